"""`--cuda-plan`, `pytest-cudaenv explain` and `matrix`, on a suite that pytest really collects and runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pytest_cudaenv import cli
from pytest_cudaenv.host.devices import Host
from pytest_cudaenv.ledger.suite import Suite, read_suite
from pytest_cudaenv.requirements.attention_backends import registered
from pytest_cudaenv.requirements.hub_kernels import HubKernel

OnHost = Callable[[Host], None]

SUITE = """
    import pytest
    from pytest_cudaenv import attn_backends, cuda_isolated, dtypes, requires_cuda, requires_hub_kernels
    pytestmark = requires_cuda(capability=">=8.0")
    @requires_cuda(devices=2, memory="8GB")
    def test_two(cuda_devices): pass
    @requires_cuda(devices=8)
    def test_eight(): pass
    @cuda_isolated
    @requires_hub_kernels("org/kernel", version=1)
    def test_kernel(cuda_device): pass
    @attn_backends("ring", "flash_attention_3")
    @dtypes("bf16")
    def test_cell(cell): pass
"""

PLAIN = """
    import pytest
    def test_cpu(): pass
    @pytest.mark.skip(reason="not now")
    def test_skipped(): pass
    @pytest.mark.parametrize("x", ["a b", "::", "@x", "-x", "é", "a\\nb", "[", "\\u2028", "'\\"$(false)"])
    def test_odd(x): pass
    class TestClass:
        def test_ünïcode(self): pass
"""

CONFTEST = """
    from pytest_cudaenv import AttnBackend
    def pytest_cudaenv_attn_backends():
        return [AttnBackend("ring", distribution="pytest", modules=("pytest",), dtypes=("bfloat16",))]
"""

INI = """
    [pytest]
    cuda_runners =
        cpu: cost=0.1 label=ubuntu-latest
        h100: devices=h100 package=flash-attn-3 cost=4 label=self-hosted label=h100
        h100x2: devices=h100:2 requires=org/kernel requires=hub_kernels cost=8
"""


@pytest.fixture(autouse=True)
def _suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # what is not at hand is not to be had
    pytester.makeini(INI)
    pytester.makeconftest(CONFTEST)
    folder = pytester.mkdir("tests")
    for name, text in {"test_gpu": SUITE, "test_plain": PLAIN}.items():
        path = pytester.makepyfile(**{name: text})
        path.rename(folder / path.name)


def call(capfd: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """(exit status, stdout, stderr) of the command."""
    status = cli.main(arguments)
    captured = capfd.readouterr()
    assert "Traceback (most recent" not in captured.out + captured.err
    return status, captured.out, captured.err


def collected(pytester: pytest.Pytester, *arguments: str) -> Suite:
    result = pytester.runpytest_subprocess("--collect-only", "--cuda-plan", "out/suite.jsonl", *arguments)
    assert result.ret == 0
    return read_suite((pytester.path / "out" / "suite.jsonl").read_text(encoding="utf-8").splitlines())


# --cuda-plan -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [(), ("-n", "2"), ("--cuda-unmet", "deselect"), ("--cuda-simulate", "h100:2"), ("--cuda-isolation", "off")],
    ids=" ".join,
)
def test_a_collection_tells_what_each_test_needs_on_every_host(
    pytester: pytest.Pytester, arguments: tuple[str, ...]
) -> None:
    suite = collected(pytester, *arguments)
    tests = {test.id.partition("::")[2]: test for test in suite.tests}
    assert len(tests) == 17
    two = tests["test_two"]
    assert (two.file, two.requirement.devices, two.requirement.memory) == ("tests/test_gpu.py", 2, 8 * 10**9)
    assert [where for where, _ in two.sources] == [
        "@requires_cuda(devices=2, memory='8GB')", "@requires_cuda(capability='>=8.0')", "fixture cuda_devices",
    ]  # fmt: skip
    assert tests["test_kernel"].requirement.hub_kernels == (HubKernel("org/kernel", version=1),)
    assert tests["test_cell[ring-bf16]"].cell == "ring-bf16"
    assert tests["test_skipped"].skips == "not now"
    assert not tests["test_cpu"].sources
    assert [backend.name for backend in suite.backends] == ["ring"]
    assert [line.partition(":")[0] for line in suite.told.runners] == ["cpu", "h100", "h100x2"]


def test_what_was_left_out_or_skipped_itself_is_told(pytester: pytest.Pytester) -> None:
    (pytester.path / "tests" / "test_absent.py").write_text("import pytest\npytest.importorskip('nonesuch')\n")
    suite = collected(pytester, "-k", "not odd", "--cuda-simulate", "a100", "--cuda-visible", "0")
    assert (suite.told.deselected, suite.told.simulate) == (9, "a100")
    [gone] = suite.uncollected
    assert (gone.id, gone.failed) == ("tests/test_absent.py", False)
    assert "nonesuch" in gone.why
    assert suite.told.mask is not None


def test_it_goes_with_collect_only_and_needs_a_file(pytester: pytest.Pytester) -> None:
    result = pytester.runpytest_subprocess("--cuda-plan", "suite.jsonl")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: --cuda-plan goes with --collect-only*"])
    result = pytester.runpytest_subprocess("--collect-only", "--cuda-plan", "tests")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: --cuda-plan *tests: *: name a file that can be written"])


# explain ---------------------------------------------------------------------------------------------------------


def test_explain_for_readers(capfd: pytest.CaptureFixture[str]) -> None:
    status, out, _ = call(capfd, "explain", "tests/test_gpu.py::test_two", "--simulate", "h100:2")
    assert status == 0
    assert out.splitlines()[0].startswith("cudaenv: SIMULATED h100:2: 2 x NVIDIA H100 80GB HBM3")
    assert out.splitlines()[2:] == [
        "tests/test_gpu.py::test_two",
        "  needs    2 CUDA devices",
        "           7.5 GiB on each",
        "           capability >=8.0",
        "  from     @requires_cuda(devices=2, memory='8GB'): 2 CUDA devices, 7.5 GiB on each",
        "           @requires_cuda(capability='>=8.0'): a CUDA device, capability >=8.0",
        "           fixture cuda_devices: a CUDA device",
        "  verdict  would run on NVIDIA H100 80GB HBM3",
        "  runs in  a device process; leases 2 devices, 7.5 GiB of each",
        "  runners  cpu: [cuda-none] needs 2 CUDA devices; have none",
        "           h100: [cuda-devices] needs 2 CUDA devices; have 1",
        "           h100x2: would run",
    ]


def test_explain_says_why_not(capfd: pytest.CaptureFixture[str]) -> None:
    status, out, _ = call(capfd, "explain", "tests", "-k", "eight or skipped", "--simulate", "t4:2")
    assert status == 1
    lines = [line.strip() for line in out.splitlines()]
    place = lines.index("verdict  would skip")
    assert lines[place + 1 : place + 5] == [
        "[cuda-devices] needs 8 CUDA devices; have 2",
        "Run it on a runner with as many GPUs, or widen the mask.",
        "[cuda-capability] needs capability >=8.0; have 7.5 (T4)",
        "Run it on a device of that capability.",
    ]
    assert "verdict  would skip: the suite's own mark says so: not now" in lines
    assert "runs in  a device process; leases 8 devices, whole" in lines


def explained(capfd: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    status, out, _ = call(capfd, "explain", "--json", *arguments)
    data = json.loads(out)
    tests = {test["id"].partition("::")[2]: test for test in data["tests"]}
    assert status == int(any(test["verdict"] != "run" for test in tests.values()) or bool(data["uncollected"]))
    return tests


def test_explain_for_programs(capfd: pytest.CaptureFixture[str]) -> None:
    tests = explained(capfd, "tests/test_gpu.py", "tests/test_plain.py::test_cpu", "--simulate", "h100:2")
    assert {name: test["verdict"] for name, test in tests.items()} == {
        "test_two": "run", "test_eight": "skip", "test_kernel": "skip", "test_cpu": "run",
        "test_cell[ring-bf16]": "run", "test_cell[flash_attention_3-bf16]": "skip",
    }  # fmt: skip
    assert tests["test_two"]["lease"] == {"devices": 2, "memory": 8 * 10**9}
    assert tests["test_kernel"]["process"] == "device process of its own"
    assert tests["test_cpu"]["lease"] is None
    assert (tests["test_cpu"]["runs_on"], tests["test_two"]["runs_on"]) == ("CPU", "NVIDIA H100 80GB HBM3")
    # What a runner promises counts as there.
    runners = tests["test_kernel"]["runners"]
    assert [runner for runner, lacks in runners.items() if not lacks] == ["h100x2"]
    assert {reason["code"] for reason in runners["h100"]} == {
        reason["code"] for reason in tests["test_kernel"]["reasons"]
    }
    # The project's own backend is known while the command runs, and no longer.
    assert "ring" not in registered()


def test_explain_follows_settings(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDAENV_DEFAULT_MEMORY", "8GB")
    monkeypatch.setenv("CUDAENV_UNMET", "fail")
    tests = explained(
        capfd, "tests/test_gpu.py", "--simulate", "h100:2", "--assume", "flash-attn-3", "-k", "cell or eight"
    )
    assert tests["test_cell[flash_attention_3-bf16]"]["verdict"] == "run"
    assert tests["test_cell[flash_attention_3-bf16]"]["lease"] == {"devices": 1, "memory": 8 * 10**9}
    assert tests["test_eight"]["verdict"] == "fail"
    tests = explained(capfd, "tests/test_gpu.py", "--simulate", "h100:2", "--", "--cuda-isolation", "off")
    assert (tests["test_two"]["lease"], tests["test_two"]["process"]) == (None, "pytest process")


def test_explain_asks_this_host_under_its_mask(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    tests = explained(capfd, "tests/test_gpu.py::test_two", "--simulate", "h100:2")
    assert [reason["have"] for reason in tests["test_two"]["reasons"]] == ["1 visible of 2"]


def test_explain_agrees_with_a_run(pytester: pytest.Pytester, capfd: pytest.CaptureFixture[str]) -> None:
    tests = explained(capfd, "tests", "--simulate", "h100:2")
    pytester.runpytest_subprocess("--cuda-simulate", "h100:2", "--cuda-ledger", "ledger.json")
    lines = [json.loads(line) for line in (pytester.path / "ledger.json").read_text(encoding="utf-8").splitlines()]
    ran = {line["id"].partition("::")[2]: line for line in lines if line["kind"] == "test"}
    assert {name: test["verdict"] for name, test in tests.items()} == {
        name: "run" if line["outcome"] == "passed" else "skip" for name, line in ran.items()
    }
    for name, line in ran.items():
        codes = [reason["code"] for reason in line.get("reasons", [])]
        # Why the suite itself skips a test is read from the skip, when it comes.
        assert [reason["code"] for reason in tests[name]["reasons"]] == [c for c in codes if not c.startswith("skip-")]
        assert len(line.get("devices", [])) == (tests[name]["lease"] or {}).get("devices", 0) * (not codes)


def test_a_file_that_cannot_be_collected_is_shown(pytester: pytest.Pytester, capfd: pytest.CaptureFixture[str]) -> None:
    (pytester.path / "tests" / "test_broken.py").write_text("import nonesuch_at_all\n")
    for command in ("explain", "matrix"):
        status, out, err = call(capfd, command, "tests")
        assert (status, out) == (2, "")
        assert "No module named 'nonesuch_at_all'" in err
        assert "tests/test_broken.py" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("tests/test_gpu.py::nothing",), "not found: "),
        (("-k", "nothing"), "no tests were collected"),
        (("--simulate", "x900"), "--cuda-simulate: unknown device 'x900'"),
        (("--", "-p", "no:cudaenv"), "unrecognized arguments: --cuda-plan"),
        (("tests/test_plain.py", "--", "-o", "cuda=false"), "pytest told of no suite"),
        (("--", "-o", "cuda_runners=broken"), "cuda_runners: 'broken'"),
    ],
)
def test_usage_errors(capfd: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str) -> None:
    for command in ("explain", "matrix"):
        status, out, err = call(capfd, command, *arguments)
        assert (status, out) == (2, "")
        assert message in err


# matrix ----------------------------------------------------------------------------------------------------------


def lists(folder: Path) -> dict[str, list[str]]:
    return {path.name: path.read_text(encoding="utf-8").splitlines() for path in sorted(folder.glob("*.txt"))}


def test_matrix_for_github(
    pytester: pytest.Pytester, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    output = pytester.path / "output"
    output.write_text("before=1\n")
    monkeypatch.setenv("GITHUB_OUTPUT", str(output))
    arguments = ("matrix", "--format", "github", "--github-output")
    status, _, err = call(capfd, *arguments)
    assert status == 1
    assert output.read_text() == "before=1\n", "what is incomplete starts no jobs"
    assert [line for line in err.splitlines() if "[matrix" in line] == [
        "pytest-cudaenv: [matrix-no-runner] 1 test has no runner; the nearest is h100x2: [cuda-devices] needs 8 CUDA "
        "devices; have 2. Run it on a runner with as many GPUs, or widen the mask.",
    ]
    status, out, _ = call(capfd, *arguments, "--allow-none")
    assert status == 0
    assert output.read_text() == f"before=1\nmatrix={out}"
    rows = json.loads(out)["include"]
    assert [(row["job"], row["labels"], row["tests"], row["count"]) for row in rows] == [
        ("cpu-1", ["ubuntu-latest"], "jobs/cpu-1.txt", 12),
        ("h100-1", ["self-hosted", "h100"], "jobs/h100-1.txt", 2),
        ("h100x2-1", ["h100x2"], "jobs/h100x2-1.txt", 2),
    ]
    found = lists(pytester.path / "jobs")
    assert found["h100-1.txt"] == [
        f"tests/test_gpu.py::test_cell[{backend}-bf16]" for backend in ("ring", "flash_attention_3")
    ]
    assert found["no-runner.txt"] == ["tests/test_gpu.py::test_eight"]


def test_pytest_runs_exactly_what_a_list_holds(
    pytester: pytest.Pytester, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With odd characters, from a folder that is not the root, and with files that look like options."""
    (pytester.path / "tests" / "-x").mkdir()
    (pytester.path / "tests" / "-x" / "test_dash.py").write_text("def test_dash(): pass\n")
    monkeypatch.chdir(pytester.path / "tests")
    status, _, _ = call(capfd, "matrix", "--jobs", "out/lists", "--allow-none", "--shards", "cpu=2", "--", ".")
    assert status == 0
    held = lists(Path("out/lists"))
    assert "./-x/test_dash.py::test_dash" in held["cpu-1.txt"] + held["cpu-2.txt"]
    ran: list[str] = []
    for name in ("cpu-1", "cpu-2"):
        command = [sys.executable, "-m", "pytest", f"@out/lists/{name}.txt", "--cuda-ledger", f"{name}.json"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=120)
        lines = [json.loads(line) for line in Path(f"{name}.json").read_text(encoding="utf-8").splitlines()]
        ran += [line["id"] for line in lines if line["kind"] == "test"]
    assert len(ran) == len(set(ran)) == 13
    assert {nodeid.removeprefix("tests/") for nodeid in ran} == {
        line.removeprefix("./") for name in ("cpu-1.txt", "cpu-2.txt") for line in held[name]
    }


def test_matrix_for_gitlab(capfd: pytest.CaptureFixture[str]) -> None:
    import yaml

    options = ("--gitlab-include", "gpu.yml", "--gitlab-extends", ".tests")
    status, out, _ = call(capfd, "matrix", "--format", "gitlab", "--allow-none", *options)
    pipeline = yaml.safe_load(out)
    assert status == 0
    assert pipeline == json.loads(out)
    assert pipeline.pop("include") == [{"local": "gpu.yml"}]
    assert list(pipeline) == ["cpu-1", "h100-1", "h100x2-1"]
    assert pipeline["h100x2-1"] == {
        "extends": ".tests",
        "tags": ["h100x2"],
        "needs": [{"pipeline": "$PARENT_PIPELINE_ID", "job": "matrix"}],
        "script": ["pytest @jobs/h100x2-1.txt --cuda-runner h100x2 --cuda-ledger h100x2-1.json"],
        "artifacts": {"when": "always", "paths": ["h100x2-1.json"]},
    }


def test_matrix_is_balanced_by_ledgers(pytester: pytest.Pytester, capfd: pytest.CaptureFixture[str]) -> None:
    ledger = pytester.path / "cpu.json"
    head = {"kind": "run", "ledger": 1, "runner": "cpu", "started": "2026-01-01", "plugin": "1"}
    head |= {"host": {"devices": [], "visible": []}, "software": {"distributions": {}}}
    slow = {
        "kind": "test",
        "ran_on": "CPU",
        "id": "tests/test_plain.py::test_cpu",
        "outcome": "passed",
        "seconds": {"call": 600},
    }
    ledger.write_text("".join(json.dumps(line) + "\n" for line in (head, slow)))
    options = ("--durations", "cpu.json", "--default-seconds", "60", "--max-minutes", "10", "--runner", "cpu")
    status, out, _ = call(capfd, "matrix", "tests/test_plain.py", *options)
    assert status == 0
    # A merge's document tells the same, and a run that both tell of is counted once.
    assert call(capfd, "merge", "cpu.json", "--json", "merged.json")[0] in {0, 1}
    again = ("--durations", "merged.json", *options[2:])
    assert call(capfd, "matrix", "tests/test_plain.py", *again)[:2] == (0, out)
    assert call(capfd, "matrix", "tests/test_plain.py", *again, *options[:2])[:2] == (0, out)
    assert [line.split() for line in out.splitlines()] == [
        ["cpu-1", "1", "tests", "10.0", "min", "cost", "1.00"],
        ["cpu-2", "10", "tests", "10.0", "min", "cost", "1.00"],
        ["cpu-3", "1", "tests", "1.0", "min", "cost", "0.10"],
        ["3", "jobs,", "21.0", "min", "of", "tests,", "cost", "2.10"],
        ["durations", "known", "of", "1", "of", "12", "tests"],
    ]


def test_matrix_tells_of_what_nobody_knows_and_of_cells_that_no_device_runs(
    pytester: pytest.Pytester, capfd: pytest.CaptureFixture[str]
) -> None:
    status, _, err = call(capfd, "matrix", "tests", "--runner", "cpu", "-k", "ring")
    assert status == 1  # capability >=8.0 needs a device
    assert "[matrix-no-runner] 1 test has no runner; the nearest is cpu" in err
    (pytester.path / "tests" / "test_gone.py").write_text("import pytest\npytest.skip('x', allow_module_level=True)\n")
    (pytester.path / "tests" / "test_cells.py").write_text("def test_cell(cell): pass\n")
    arguments = ("tests/test_gone.py", "tests/test_cells.py", "--runner", "cpu", "-k", "eager-fp32 or gone")
    status, _, err = call(capfd, "matrix", *arguments)
    assert status == 1
    assert "[matrix-uncollected] tests/test_gone.py skipped itself while it was collected" in err
    assert "[matrix-cpu-only] 1 test that takes a device runs on the CPU alone" in err
    assert "tests/test_cells.py::test_cell[eager-fp32]" in err
    assert call(capfd, "matrix", *arguments, "--allow-none")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--runner", "x"), "--runner: 'x': choose from cpu, h100, h100x2"),
        (("--shards", "x=2"), "--shards x=2: choose from cpu, h100, h100x2"),
        (("--shards", "cpu=0"), "--shards cpu=0: write RUNNER=N"),
        (("--durations", "nothing.json"), "--durations nothing.json: cannot be read: No such file"),
        (("--durations", "tests/test_gpu.py"), "--durations tests/test_gpu.py: "),
        (("--github-output",), "GITHUB_OUTPUT is not set"),
        (("--jobs", "tests/test_gpu.py"), "--jobs tests/test_gpu.py: "),
        (("--", "-o", "cuda_runners="), "cuda_runners has no profile"),
        (("--format", "github", "--shards", "cpu=300", "tests/test_many.py"), "300 jobs: GitHub takes 256"),
    ],
)
def test_matrix_called_wrongly(
    pytester: pytest.Pytester, capfd: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.delenv("GITHUB_OUTPUT", raising=False)
    many = "import pytest\n@pytest.mark.parametrize('x', range(300))\ndef test_it(x): pass\n"
    (pytester.path / "tests" / "test_many.py").write_text(many)
    status, out, err = call(capfd, "matrix", *arguments)
    assert (status, out) == (2, "")
    assert message in err


def test_the_command_is_started_as_a_module(pytester: pytest.Pytester) -> None:
    command = [sys.executable, "-m", "pytest_cudaenv", "explain", "tests/test_plain.py::test_cpu"]
    done = subprocess.run(command, env=dict(os.environ), capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "would run on CPU" in done.stdout
