"""What a run prints: the header where the suite uses the plugin, and the summary of what ran where."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from pytest_cudaenv.host.catalog import simulated_device, simulated_host
from pytest_cudaenv.host.devices import Host, Problem, renumbered
from pytest_cudaenv.host.mask import read_environment
from pytest_cudaenv.host.software import Software, TorchBuild
from pytest_cudaenv.ledger.header import header_lines
from pytest_cudaenv.ledger.summary import Summary

TORCH = Software(torch=TorchBuild("2.13.0+cu130", cuda="13.0"))


def lines(host: Host, environ: dict[str, str] | None = None, **settings: str) -> list[str]:
    environ = environ or {}
    return header_lines(host, read_environment(environ, host.devices), settings, environ)


def real(*keys: str) -> Host:
    devices = renumbered(simulated_device(key, i) for i, key in enumerate(keys))
    return Host(devices=devices, software=TORCH, driver="580.95.05", driver_cuda=(13, 0))


def test_devices_driver_and_torch_on_one_line() -> None:
    assert lines(real("h200", "h200")) == [
        "cudaenv: 2 x NVIDIA H200 (9.0, 140.4 GiB); driver 580.95.05, CUDA 13.0; torch 2.13.0+cu130 (CUDA 13.0)"
    ]
    assert lines(real("t4", "h100", "t4"))[0].startswith(
        "cudaenv: 2 x Tesla T4 (7.5, 15.0 GiB), 1 x NVIDIA H100 80GB HBM3 (9.0, 79.6 GiB); "
    )


def test_unified_and_unknown_memory_are_said() -> None:
    assert "1 x NVIDIA GB10 (12.1, 121.7 GiB shared with the host)" in lines(real("gb10"))[0]
    unknown = real("h100")
    unknown = replace(unknown, devices=(replace(unknown.devices[0], total_memory=None, capability=None),))
    assert "(unknown capability, unknown memory)" in lines(unknown)[0]


@pytest.mark.parametrize(
    ("software", "text"),
    [
        (Software(), "torch not installed"),
        (Software(torch=TorchBuild("2.13.0+cpu")), "torch 2.13.0+cpu (CPU build)"),
        (Software(torch=TorchBuild("2.13.0+rocm6.4", hip="6.4")), "torch 2.13.0+rocm6.4 (ROCm 6.4)"),
    ],
)
def test_the_torch_build(software: Software, text: str) -> None:
    assert lines(replace(real("h100"), software=software))[0].endswith(text)


def test_no_device_and_a_broken_one_differ() -> None:
    assert lines(Host(software=TORCH))[0].startswith("cudaenv: no NVIDIA device: tests that need one do not run")
    problem = Problem("nvml-mismatch", "driver and library differ", "Reboot.")
    assert lines(Host(software=TORCH, problem=problem))[0].startswith(
        "cudaenv: NVIDIA device present but unusable: driver and library differ [nvml-mismatch]"
    )
    assert "2 AMD GPU(s) that are not CUDA devices" in lines(Host(software=TORCH, amd_devices=2))[0]


@pytest.mark.parametrize(
    ("mask", "warning"),
    [
        ("0", "CUDA_VISIBLE_DEVICES=0 hides 1 of 2 device(s)"),
        ("0-1", "it knows no ranges"),
        ("0,9", "9 is out of range: CUDA counts 2 here"),
        ("0,0", "names one device twice"),
        ("[0]", "the value holds brackets or quotes"),
    ],
)
def test_an_inherited_mask_that_does_something_unexpected(mask: str, warning: str) -> None:
    found = [line for line in lines(real("h100", "h100"), {"CUDA_VISIBLE_DEVICES": mask}) if "warning: " in line]
    assert any(warning in line for line in found), found
    assert all(line.startswith("cudaenv: warning: ") for line in found)


def test_an_order_that_cuda_does_not_know() -> None:
    found = lines(real("h100"), {"CUDA_DEVICE_ORDER": "pci_bus_id"})
    assert any("CUDA_DEVICE_ORDER='pci_bus_id' is not a value that CUDA knows" in line for line in found)


def test_a_mask_that_shows_every_device_is_not_worth_a_line() -> None:
    assert len(lines(real("h100", "h100"), {"CUDA_VISIBLE_DEVICES": "1,0"})) == 1


def test_settings_carry_their_origin() -> None:
    assert (
        lines(real("h100"), **{"--cuda-unmet fail": "CUDAENV_UNMET"})[1] == "cudaenv: --cuda-unmet fail (CUDAENV_UNMET)"
    )


SUITE = """
    from pytest_cudaenv import requires_cuda
    def test_any(device): pass
    @requires_cuda(devices=2)
    def test_two(): pass
    @requires_cuda(capability=">=10.0")
    def test_blackwell(): pass
    @requires_cuda(capability=">=10.0", devices=2)
    def test_both(): pass
"""


def test_header_names_every_setting_with_its_origin(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    pytester.makepyfile("def test_it(cuda_device): pass")
    pytester.makeini("[pytest]\ncuda_assume = peft==0.18")
    monkeypatch.setenv("CUDAENV_SIMULATE", "t4:2")
    result = pytester.runpytest_inprocess("--cuda-unmet", "fail")
    result.stdout.fnmatch_lines(
        [
            "cudaenv: SIMULATED t4:2: 2 x Tesla T4 (7.5, 15.0 GiB); *",
            "cudaenv: --cuda-unmet fail (option)",
            "cudaenv: --cuda-simulate t4:2 (CUDAENV_SIMULATE)",
            "cudaenv: --cuda-assume peft==0.18 (ini cuda_assume)",
        ]
    )
    result.assert_outcomes(passed=1)


@pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["plain", "xdist"])
def test_one_header_and_one_summary(pytester: pytest.Pytester, workers: tuple[str, ...]) -> None:
    """Under xdist the controller prints them, from what its workers say."""
    pytester.makepyfile(SUITE.replace("def test_any(device)", "def test_any(cuda_device)"))
    result = pytester.runpytest_inprocess("--cuda-simulate", "h100", *workers)
    result.assert_outcomes(passed=1, skipped=3)
    text = result.stdout.str()
    assert text.count("cudaenv: SIMULATED h100:1: 1 x NVIDIA H100 80GB HBM3") == 1
    assert text.count("cudaenv: what ran where") == 1
    result.stdout.fnmatch_lines(
        [
            "passed: 1 on NVIDIA H100 80GB HBM3",
            "not run: 3",
            "     2 [[]cuda-capability[]] needs capability >=10.0; have 9.0 (H100 80GB HBM3)",
            "       Run it on a device of that capability.",
            "     2 [[]cuda-devices[]] needs 2 CUDA devices; have 1",
            "       Run it on a runner with as many GPUs, or widen the mask.",
        ]
    )


def test_no_mailbox_is_left_behind(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(pytester.mkdir("tmp")))
    pytester.makepyfile(SUITE)
    pytester.runpytest_subprocess("--cuda-simulate", "h100", "-n", "2")
    assert not list((pytester.path / "tmp").glob("cudaenv-*"))


def test_quiet_runs_print_no_header_and_collecting_no_summary(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(SUITE)
    quiet = pytester.runpytest_inprocess("--cuda-simulate", "h100", "--collect-only", "-q").stdout.str()
    assert "cudaenv" not in quiet
    assert (
        "cudaenv: SIMULATED" in pytester.runpytest_inprocess("--cuda-simulate", "h100", "--collect-only").stdout.str()
    )


def test_errors_come_first_and_are_counted(pytester: pytest.Pytester, on_host: Callable[[Host], None]) -> None:
    on_host(
        Host(software=TORCH, problem=Problem("nvml-unknown", "NVML, which does not answer", "Restart the container."))
    )
    pytester.makepyfile(
        """
        from pytest_cudaenv import requires_cuda, requires_package
        @requires_package("no-such-package")
        def test_missing(): pass
        def test_broken(cuda_device): pass
        def test_quiet(device): pass
        """
    )
    result = pytester.runpytest_inprocess()
    result.assert_outcomes(errors=2, skipped=1)
    result.stdout.fnmatch_lines(
        [
            "not run: 3 (2 of them errors)",
            "     2 [[]nvml-unknown[]] needs a CUDA device; have NVML, which does not answer",
            "       Restart the container.",
            "     1 [[]package-missing[]] needs no-such-package; have none",
        ]
    )


def test_lines_at_80_columns(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """`-rs` shows the whole reason; `-v` cuts it, and what is left begins with the code."""
    monkeypatch.setenv("COLUMNS", "80")
    pytester.makepyfile(
        test_fa="""
        from pytest_cudaenv import requires_flash_attn3
        @requires_flash_attn3
        def test_fa3(): pass
        """
    )
    result = pytester.runpytest_inprocess(
        "--cuda-simulate", "a10g", "--cuda-assume", "flash-attn-3==3.0.0", "-v", "-rs"
    )
    result.stdout.fnmatch_lines(
        ["test_fa.py::test_fa3 SKIPPED ([[]attn-capability[]] FA3 needs sm_90; hav...) [[]100%[]]"]
    )
    result.stdout.fnmatch_lines(
        ["SKIPPED [[]1[]] test_fa.py:2: [[]attn-capability[]] FA3 needs sm_90; have 8.6 (A10G)"]
    )


def test_reports_survive_json() -> None:
    """A summary adds up the same from records that went through xdist's serialisation."""
    reason = {"code": "c-d", "need": "needs x", "have": "y", "remedy": "Get x.", "rank": 2}
    summary = Summary()
    for nodeid in ("a", "b", "b"):
        summary.add(nodeid, "setup", "skipped", {"cell": None, "ran_on": None, "reasons": [reason]})
    summary.add("c", "call", "passed", {"cell": "sdpa-bf16", "ran_on": "CPU"})
    summary.add("c", "teardown", "passed", {"cell": "sdpa-bf16", "ran_on": "CPU"})
    summary.add("d", "call", "failed", {"cell": None, "ran_on": "CPU"})
    summary.add("e", "call", "passed", None)
    assert summary.lines() == ["passed: 1 on CPU", "not run: 2", "     2 [c-d] needs x; have y", "       Get x."]


def test_simulated_hosts_are_marked() -> None:
    assert lines(simulated_host("gb10"))[0].startswith("cudaenv: SIMULATED gb10:1: 1 x NVIDIA GB10")
