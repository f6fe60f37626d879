"""`pytest-cudaenv devices` and `doctor`: on fabricated hosts, and under every mask that was measured on real ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pytest_cudaenv import cli
from pytest_cudaenv._version import __version__
from pytest_cudaenv.host.catalog import simulated_host
from pytest_cudaenv.host.devices import Host
from pytest_cudaenv.host.problems import PROBLEMS
from pytest_cudaenv.host.software import Software, TorchBuild

OnHost = Callable[[Host], None]

ORACLE = Path(__file__).parents[1] / "data" / "cuda_visible_devices_driver.jsonl"
MEASURED, *ROWS = (json.loads(line) for line in ORACLE.read_text(encoding="utf-8").splitlines())

DISPUTED: tuple[str | None, str] = (None, "")
"""Mask and order of the one row that is left out: it says that CUDA sees no device with `CUDA_DEVICE_ORDER` set to
the empty string and that `cuInit` succeeds all the same; measured again, `cuInit` returns 101 there."""

H200 = simulated_host("h200:2")


def mapped(mask: str | None) -> str | None:
    """The measured mask, with the simulated host's UUIDs in the place of the measured ones."""
    if mask is None:
        return None
    for measured, device in zip(MEASURED["uuids"], H200.devices, strict=True):
        for length in (len(measured), 12, 5):  # in full, the first group, one digit
            old, new = measured[4:length], device.uuid[4:length]
            mask = mask.replace(f"GPU-{old.upper()}", f"GPU-{new.upper()}").replace(f"GPU-{old}", f"GPU-{new}")
            mask = mask.replace(old, new) if length > 5 else mask
    return mask


def row_id(row: dict[str, Any]) -> str:
    mask = "unset" if row["mask"] is None else repr(row["mask"])
    return mask if row["order"] is None else f"{mask} {row['order']!r}"


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """(exit status, stdout, stderr) of the command, in this process."""
    status = cli.main(arguments)
    captured = capsys.readouterr()
    assert "Traceback" not in captured.out + captured.err
    return status, captured.out, captured.err


# devices -------------------------------------------------------------------------------------------------------


def test_the_simulated_uuids_can_stand_for_the_measured_ones() -> None:
    first, second = (d.uuid for d in H200.devices)
    assert first[4] != second[4]
    assert first.upper() != first
    assert mapped(MEASURED["uuids"][1]) == second
    assert mapped("GPU-b") == first[:5]


@pytest.mark.parametrize("row", [r for r in ROWS if (r["mask"], r["order"]) != DISPUTED], ids=row_id)
def test_devices_says_what_cuda_sees_under_every_measured_mask(
    row: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mask = mapped(row["mask"])
    if mask is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", mask)
    if row["order"] is not None:
        monkeypatch.setenv("CUDA_DEVICE_ORDER", row["order"])
    status, out, _ = call(capsys, "devices", "--simulate", "h200:2", "--json")
    answer = json.loads(out)
    if row["cu_init"] == 101:
        assert status == 1
        assert set(answer) == {"error"}
        assert set(answer["error"]) == {"code", "message", "cu_init"}
        assert (answer["error"]["code"], answer["error"]["cu_init"]) == ("cuda-mask-invalid", 101)
        assert answer["error"]["message"].endswith("it makes every CUDA call fail")
        return
    assert status == 0
    assert row["cu_init"] == (0 if answer else 100)
    assert answer == [
        {
            "index": index,
            "uuid": H200.devices[nvml].uuid,
            "name": "NVIDIA H200",
            "capability": "9.0",
            "total_memory": 143771 * 1024**2,
        }
        for index, nvml in enumerate(row["visible"])
    ]


def test_every_other_measured_row_is_tested() -> None:
    assert sum((r["mask"], r["order"]) == DISPUTED for r in ROWS) == 1
    assert len(ROWS) > 70


COMMANDS = {
    "module": [sys.executable, "-m", "pytest_cudaenv"],
    "script": [str(Path(sys.executable).with_name("pytest-cudaenv"))],
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("mask", "status", "visible"), [("1,0", 0, [1, 0]), ("0,0", 1, None), ("-1", 0, []), ("0-3", 0, [0])]
)
def test_both_commands_answer_in_a_process_of_their_own(
    command: str, mask: str, status: int, visible: list[int] | None
) -> None:
    arguments = ["devices", "--simulate", "h200:2", "--json"]
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": mask}
    done = subprocess.run(
        COMMANDS[command] + arguments, env=environ, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (status, "")
    answer = json.loads(done.stdout)
    if visible is None:
        assert answer["error"]["cu_init"] == 101
    else:
        assert [row["uuid"] for row in answer] == [H200.devices[i].uuid for i in visible]


def test_devices_for_readers(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,9")
    first, second = (d.uuid for d in H200.devices)
    status, out, _ = call(capsys, "devices", "--simulate", "h200:2")
    assert status == 0
    assert out.splitlines() == [
        f"cuda:0  {second}  NVIDIA H200  9.0  140.4 GiB",
        "warning: CUDA_VISIBLE_DEVICES=1,9 ends at the token '9' (9 is out of range: CUDA counts 2 here, from 0)",
    ]
    assert first not in out


@pytest.mark.parametrize(
    ("mask", "status", "line"),
    [
        ("-1", 0, "no CUDA device is visible"),
        ("0,0", 1, "[cuda-mask-invalid] CUDA_VISIBLE_DEVICES=0,0 names one device twice (NVIDIA H200); it makes every "
         "CUDA call fail"),
    ],
)  # fmt: skip
def test_devices_for_readers_where_none_is_visible(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, mask: str, status: int, line: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", mask)
    assert call(capsys, "devices", "--simulate", "h200:2")[:2] == (status, f"{line}\n")


def test_devices_of_a_host_without_any(capsys: pytest.CaptureFixture[str], on_host: OnHost) -> None:
    on_host(Host())
    assert call(capsys, "devices", "--json") == (0, "[]\n", "")
    assert call(capsys, "devices") == (0, "no CUDA device is visible\n", "")


@pytest.mark.parametrize("code", PROBLEMS)
def test_devices_of_a_host_whose_device_cannot_be_used(
    capsys: pytest.CaptureFixture[str], on_host: OnHost, code: str
) -> None:
    problem = PROBLEMS[code]
    on_host(Host(problem=problem))
    status, out, _ = call(capsys, "devices", "--json")
    assert status == 1
    assert json.loads(out) == {"error": {"code": code, "message": f"{problem.have}. {problem.remedy}", "cu_init": None}}
    assert call(capsys, "devices")[:2] == (1, f"[{code}] {problem.have}. {problem.remedy}\n")


def test_what_no_query_answered_is_unknown_and_not_zero(capsys: pytest.CaptureFixture[str], on_host: OnHost) -> None:
    device = replace(H200.devices[0], capability=None, total_memory=None)
    on_host(Host(devices=(device,)))
    assert call(capsys, "devices")[1] == f"cuda:0  {device.uuid}  NVIDIA H200  unknown  unknown\n"
    row = json.loads(call(capsys, "devices", "--json")[1])[0]
    assert (row["capability"], row["total_memory"]) == (None, None)


# doctor --------------------------------------------------------------------------------------------------------

CPU_BUILD, CUDA_BUILD, ROCM_BUILD = TorchBuild("2.13.0+cpu"), TorchBuild("2.13.0", cuda="13.0"), TorchBuild(
    "2.13.0", hip="7.1"
)  # fmt: skip

HOSTS: dict[str, Host] = {
    "h100:2": replace(simulated_host("h100:2", Software({"torch": "2.13.0"}, torch=CUDA_BUILD)), simulated=None),
    "gb10": replace(simulated_host("gb10", Software({"torch": "2.13.0"}, torch=CUDA_BUILD)), simulated=None),
    "none": Host(software=Software({"torch": "2.13.0+cpu"}, torch=CPU_BUILD)),
    "problem": Host(problem=PROBLEMS["nvml-mismatch"], software=Software({"torch": "2.13.0"}, torch=CUDA_BUILD)),
    "rocm": Host(amd_devices=2, software=Software({"torch": "2.13.0+rocm7.1"}, torch=ROCM_BUILD)),
}

FIRST_LINES = {
    "h100:2": "cudaenv: 2 x NVIDIA H100 80GB HBM3 (9.0, 79.6 GiB); driver 580.95.05, CUDA 13.0; "
    "torch 2.13.0 (CUDA 13.0)",
    "gb10": "cudaenv: 1 x NVIDIA GB10 (12.1, 121.7 GiB shared with the host); driver 580.95.05, CUDA 13.0; "
    "torch 2.13.0 (CUDA 13.0)",
    "none": "cudaenv: no NVIDIA device: tests that need one do not run, cells run on the CPU; "
    "torch 2.13.0+cpu (CPU build)",
    "problem": "cudaenv: NVIDIA device present but unusable: NVML of another driver version [nvml-mismatch]; "
    "torch 2.13.0 (CUDA 13.0)",
    "rocm": "cudaenv: no NVIDIA device, 2 AMD GPU(s) that are not CUDA devices: tests that need one do not run, cells "
    "run on the CPU; torch 2.13.0 (ROCm 7.1)",
}

FOUND = {
    # subject -> the codes of its reasons
    "h100:2": {"a CUDA device": [], "two CUDA devices": [], "bf16": [], "fp8_e4m3": [], "fp4": ["dtype-native"]},
    "gb10": {"a CUDA device": [], "two CUDA devices": ["cuda-devices"], "bf16": [], "tf32": []},
    "none": {"a CUDA device": ["cuda-none"], "bf16": ["cuda-none"], "attention eager": []},
    "problem": {"a CUDA device": ["nvml-mismatch"], "attention eager": ["nvml-mismatch"]},
    "rocm": {"a CUDA device": ["vendor-rocm"], "attention eager": []},
}


@pytest.mark.parametrize("name", HOSTS)
def test_doctor_tells_what_decides_a_skip(capsys: pytest.CaptureFixture[str], on_host: OnHost, name: str) -> None:
    on_host(HOSTS[name])
    status, out, _ = call(capsys, "doctor")
    lines = out.splitlines()
    assert status == int(name == "problem")
    assert lines[:2] == [f"pytest-cudaenv {__version__}", FIRST_LINES[name]]
    assert {"environment", "installed", "what tests may need"} <= set(lines)
    assert f"  torch {HOSTS[name].software.distributions['torch']}" in lines
    assert "  flash-attn-3 not installed" in lines
    for subject, codes in FOUND[name].items():
        told = next(line for line in lines if line.startswith(f"  {subject}: "))
        assert told.removeprefix(f"  {subject}: ").startswith(f"[{codes[0]}] " if codes else "ok"), told


@pytest.mark.parametrize("name", HOSTS)
def test_doctor_in_json(
    capsys: pytest.CaptureFixture[str], on_host: OnHost, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDAENV_UNMET", "fail")
    host = HOSTS[name]
    on_host(host)
    status, out, _ = call(capsys, "doctor", "--json")
    report = json.loads(out)
    assert status == int(name == "problem")
    assert report["version"] == __version__
    assert [d["uuid"] for d in report["devices"]] == [d.uuid for d in host.devices]
    assert report["environment"]["CUDAENV_UNMET"] == "fail"
    assert report["distributions"]["flash-attn"] is None
    for subject, codes in FOUND[name].items():
        assert [reason["code"] for reason in report["checks"][subject]] == codes
    if name == "problem":
        problem = PROBLEMS["nvml-mismatch"]
        assert report["problem"] == {"code": problem.code, "have": problem.have, "remedy": problem.remedy}
        assert report["checks"]["a CUDA device"][0]["remedy"] == problem.remedy
    else:
        assert report["problem"] is None


@pytest.mark.parametrize("code", PROBLEMS)
def test_doctor_survives_every_problem(capsys: pytest.CaptureFixture[str], on_host: OnHost, code: str) -> None:
    on_host(Host(problem=PROBLEMS[code]))
    status, out, _ = call(capsys, "doctor")
    assert status == 1
    assert f"[{code}]" in out
    assert PROBLEMS[code].remedy in out


def test_doctor_under_a_mask_that_breaks_cuda(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "pci_bus_id")
    status, out, _ = call(capsys, "doctor", "--simulate", "h100:2")
    assert status == 1
    assert "  CUDA_DEVICE_ORDER=pci_bus_id" in out.splitlines()
    warning = next(line for line in out.splitlines() if line.startswith("cudaenv: warning: CUDA_DEVICE_ORDER="))
    assert warning.endswith("it makes every CUDA call fail")
    assert "  a CUDA device: [cuda-mask-invalid] needs a CUDA device; have a mask under which CUDA fails" in out


def test_doctor_lists_what_a_mask_hides(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    status, out, _ = call(capsys, "doctor", "--simulate", "h100:2")
    hidden, seen = (d.uuid for d in simulated_host("h100:2").devices)
    assert status == 0
    assert f"  cuda:0  NVIDIA H100 80GB HBM3 (9.0, 79.6 GiB)  {seen}" in out.splitlines()
    assert f"  hidden  NVIDIA H100 80GB HBM3 (9.0, 79.6 GiB)  {hidden}" in out.splitlines()
    assert "cudaenv: warning: CUDA_VISIBLE_DEVICES=1 hides 1 of 2 device(s)" in out.splitlines()


# Usage ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["devices", "doctor"])
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("h1000", "pytest-cudaenv: --simulate: unknown device 'h1000'; choose from p100, p40, v100, "),
        ("h100:0", "pytest-cudaenv: --simulate: 'h100:0': the count is a number from 1 to 16"),
        ("h100:many", "pytest-cudaenv: --simulate: 'h100:many': the count is a number from 1 to 16"),
        ("", "pytest-cudaenv: --simulate: unknown device ''; choose from p100"),
    ],
)
def test_an_unknown_host_is_a_usage_error_that_names_the_choices(
    capsys: pytest.CaptureFixture[str], command: str, name: str, message: str
) -> None:
    status, out, err = call(capsys, command, "--simulate", name, "--json")
    assert (status, out) == (2, "")
    assert err.startswith(message)
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("arguments", [[], ["unknown"], ["devices", "--jsn"]])
def test_a_wrong_command_is_a_usage_error(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2
    assert capsys.readouterr().err.startswith("usage: pytest-cudaenv")


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"pytest-cudaenv {__version__}\n"


@pytest.mark.parametrize("arguments", [["doctor"], ["doctor", "--json"], ["devices", "--json"]])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_has_seen_enough_gets_no_traceback(arguments: list[str], unbuffered: str) -> None:
    read, write = os.pipe()
    os.close(read)  # as `| head` does, only sooner
    environ = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    command = [*COMMANDS["module"], *arguments, "--simulate", "h100:2"]
    try:
        done = subprocess.run(
            command, env=environ, stdout=write, stderr=subprocess.PIPE, text=True, timeout=60, check=False
        )
    finally:
        os.close(write)
    assert (done.stderr, done.returncode) == ("", 0)
