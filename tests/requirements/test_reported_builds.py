"""Failures that come from dtypes, torch builds, drivers, vendors and versions (T17, T18, T21, T22, T23, T30)."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fabricated_hosts import capable, codes, device, everything, host, reading, software

from pytest_cudaenv.host.devices import Capability
from pytest_cudaenv.host.software import TorchBuild
from pytest_cudaenv.requirements import attention, precision, torch_build
from pytest_cudaenv.requirements.packages import package_reasons, version_fits
from pytest_cudaenv.requirements.precision import UnknownDtypeError, dtype_name
from pytest_cudaenv.requirements.reason import Rank
from pytest_cudaenv.requirements.requirement import Requirement, unmet

ONE = Requirement(devices=1)
CU130 = TorchBuild("2.13.0+cu130", "13.0", arch_list=("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"))


def test_bf16_1_turing_emulates() -> None:
    """https://github.com/pytorch/pytorch/pull/148322"""
    [reason] = precision.dtype_reasons("bfloat16", device("t4"))
    assert str(reason) == "[dtype-native] bf16 needs capability 8.0; have 7.5 (T4)"


def test_bf16_2_volta_emulates() -> None:
    """https://github.com/pytorch/pytorch/issues/124996"""
    for backend in ("eager", "sdpa", "flex_attention"):
        reasons = attention.device_reasons(backend, "bfloat16", device("v100"), everything())
        assert codes(reasons) == ["dtype-native"]


@pytest.mark.parametrize(
    ("capability", "native"),
    [((8, 0), False), ((8, 6), False), ((8, 9), True), ((9, 0), True), ((10, 0), True), ((12, 0), True)],
)
def test_fp8_1_from_ada_on(capability: Capability, native: bool) -> None:
    """https://github.com/pytorch/pytorch/issues/118703"""
    for name in ("float8_e4m3fn", "float8_e5m2"):
        assert (precision.dtype_reasons(name, capable(capability)) == []) is native


def test_fp8_2_the_dtype_itself_carries_the_need() -> None:
    """https://github.com/pytorch/pytorch/pull/164251"""
    found = host("a10g")
    needed = Requirement(devices=1, dtypes=("float8_e4m3fn",))
    [reason] = unmet(needed, found, reading(found))
    assert str(reason) == "[dtype-native] fp8_e4m3 needs capability 8.9; have 8.6 (A10G)"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("bf16", "bfloat16"),
        ("torch.bfloat16", "bfloat16"),
        (" BFloat16 ", "bfloat16"),
        ("half", "float16"),
        ("fp8", "float8_e4m3fn"),
        ("fp8_e5m2", "float8_e5m2"),
        ("nvfp4", "float4_e2m1fn_x2"),
        ("tf32", "tf32"),
    ],
)
def test_dtype_names(text: str, name: str) -> None:
    assert dtype_name(text) == name


def test_a_torch_dtype_is_read_by_its_text() -> None:
    class Dtype:
        def __str__(self) -> str:
            return "torch.float8_e5m2"

    assert dtype_name(Dtype()) == "float8_e5m2"
    assert precision.dtype_id("torch.bfloat16") == "bf16"


@pytest.mark.parametrize("text", ["bf61", "int8", "", None, "torch."])
def test_unknown_dtypes(text: str | None) -> None:
    with pytest.raises(UnknownDtypeError, match="choose from fp64, fp32, fp16, bf16"):
        dtype_name(text)


def test_arch_1_no_code_for_the_device() -> None:
    """https://github.com/Kaggle/kaggle-cli/issues/1151"""
    [reason] = torch_build.device_reasons(device("p100"), CU130)
    assert str(reason) == "[torch-arch] torch needs code for sm_60; have none (P100-SXM2-16GB)"
    assert reason.is_error
    assert "sm_75, sm_80, sm_86, sm_90, sm_100, sm_120" in reason.remedy


def test_arch_2_no_false_alarm_on_gb10() -> None:
    """https://github.com/pytorch/pytorch/issues/164596"""
    assert torch_build.device_reasons(device("gb10"), CU130) == []


def test_arch_3_an_older_torch_than_meant() -> None:
    """https://github.com/runpod/containers/pull/115"""
    old = TorchBuild("2.4.1+cu124", "12.4", arch_list=("sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90"))
    [reason] = torch_build.device_reasons(device("b200"), old)
    assert (reason.code, reason.is_error) == ("torch-arch", True)
    assert "2.4.1+cu124 has sm_50" in reason.remedy


def test_arch_4_an_importable_package_is_no_device() -> None:
    """https://github.com/apache/mahout/pull/1416"""
    found = host(software=everything())
    needed = Requirement(devices=1, attn_backends=("flash_attention_2",), packages=("flash-attn",))
    assert codes(unmet(needed, found, reading(found))) == ["cuda-none"]


@pytest.mark.parametrize(
    ("archs", "key", "runs"),
    [
        (("sm_80",), "a10g", True),
        (("sm_86",), "a100", False),
        (("sm_80",), "orin", False),
        (("sm_87",), "orin", True),
        (("sm_87",), "l4", False),
        (("sm_70",), "xavier", False),
        (("sm_90a",), "h100", True),
        (("sm_90a",), "b200", False),
        (("sm_100",), "b300", True),
        (("sm_100a",), "b300", False),
        (("sm_100f",), "b300", True),
        (("sm_101",), "thor", True),
        (("sm_100",), "thor", False),
        (("sm_110",), "thor", True),
        (("sm_103",), "b200", False),
        (("sm_120",), "b200", False),
        (("sm_80", "compute_90"), "rtx5090", True),
        (("compute_90",), "a100", False),
        (("compute_90a",), "b200", False),
        (("compute_80",), "orin", True),
        (("sm_next",), "p100", True),
    ],
)
def test_which_code_runs(archs: tuple[str, ...], key: str, runs: bool) -> None:
    torch = TorchBuild("2.13.0", "13.0", arch_list=archs)
    assert (torch_build.device_reasons(device(key), torch) == []) is runs


# A release wheel of which the list of archs is not known yet, on x86-64.
@pytest.mark.parametrize(
    ("torch", "key", "runs"),
    [
        ("2.13.0+cu126", "p100", True),
        ("2.13.0+cu126", "b200", False),
        ("2.13.0+cu130", "p100", False),
        ("2.13.0+cu130", "v100", False),
        ("2.13.0+cu130", "t4", True),
        ("2.13.0+cu130", "l4", True),
        ("2.13.0+cu130", "b300", True),
        ("2.13.0+cu130", "gb10", True),
        ("2.13.0+cu130", "orin", True),
        ("2.13.0+cu130", "thor", True),
        ("2.13.0+cu128", "p100", True),
        ("2.11.0+cu130", "p100", True),
    ],
)
def test_release_wheels(torch: str, key: str, runs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    assert (torch_build.device_reasons(device(key), software(torch=torch).torch) == []) is runs


def test_other_builds_are_not_judged_by_the_release_table() -> None:
    for build in (TorchBuild("2.13.0", "13.0"), TorchBuild("2.13.0a0+b1.nv25.10", "13.0"), TorchBuild("2.13.0+cpu")):
        assert torch_build.device_reasons(device("p100"), build) == []
    assert torch_build.device_reasons(device("p100"), None) == []
    assert torch_build.device_reasons(capable(None), CU130) == []


def test_drv_1_the_driver_is_too_old() -> None:
    """https://github.com/pytorch/pytorch/issues/30528"""
    torch = software(torch="2.13.0+cu130")
    found = host("a100", software=torch, driver="470.57.02", driver_cuda=(11, 4))
    [reason] = unmet(ONE, found, reading(found))
    assert str(reason) == "[torch-driver] torch needs CUDA 13; have driver 470.57.02 for CUDA 11.4"
    assert reason.is_error


@pytest.mark.parametrize(
    ("torch", "driver_cuda", "expected"),
    [
        ("2.7.0+cu118", (11, 4), []),
        ("2.13.0+cu132", (13, 0), []),
        ("2.13.0+cu126", (13, 0), []),
        ("2.13.0+cu126", None, []),
        ("2.13.0+cu126", (11, 8), ["torch-driver"]),
        ("2.13.0+cpu", (13, 0), ["torch-cpu"]),
        ("2.13.0+rocm6.4", (13, 0), ["vendor-rocm"]),
        (None, (13, 0), []),
    ],
)
def test_builds_and_drivers(torch: str | None, driver_cuda: Capability | None, expected: list[str]) -> None:
    found = host("a100", software=software(torch=torch), driver_cuda=driver_cuda)
    reasons = torch_build.host_reasons(found)
    assert codes(reasons) == expected
    assert all(r.rank is Rank.UNUSABLE for r in reasons)
    assert torch_build.host_reasons(replace(found, devices=())) == []


def test_devices_hidden_on_purpose_do_not_need_a_cuda_build() -> None:
    found = host("a100", software=software(torch="2.13.0+cpu"))
    if_any = Requirement(device_if_any=True)
    assert codes(unmet(if_any, found, reading(found))) == ["torch-cpu"]
    assert unmet(if_any, found, reading(found, "-1")) == ()
    assert codes(unmet(ONE, found, reading(found, "-1"))) == ["cuda-hidden"]


@pytest.mark.parametrize(
    ("torch", "expected"),
    [(None, ["nccl-missing"]), ("2.13.0+cpu", ["nccl-missing"]), ("2.13.0+cu130", []), ("2.13.0+rocm6.4", [])],
)
def test_nccl(torch: str | None, expected: list[str]) -> None:
    assert codes(torch_build.nccl_reasons(software(torch=torch).torch)) == expected


def test_rocm_1_answers_as_cuda_and_is_none() -> None:
    """https://github.com/meta-pytorch/monarch/pull/3740"""
    found = host(software=everything(torch=software(torch="2.13.0+rocm6.4").torch), amd_devices=2)
    for needed in (ONE, Requirement(devices=1, attn_backends=("flash_attention_3",), dtypes=("float8_e4m3fn",))):
        [reason] = unmet(needed, found, reading(found))
        assert (reason.code, reason.is_error) == ("vendor-rocm", False)


def test_rocm_2_no_nvidia_rule_is_asked() -> None:
    """https://github.com/instructlab/instructlab/pull/2392"""
    found = host(software=everything(torch=software(torch="2.13.0+rocm6.4").torch), amd_devices=1)
    assert unmet(Requirement(device_if_any=True), found, reading(found)) == ()


@pytest.mark.parametrize(
    ("version", "specifier", "fits"),
    [
        # VER-1: https://github.com/Lightning-AI/pytorch-lightning/pull/16657
        ("2.15.0.dev20260801+cu130", ">=2.15", True),
        ("2.15.0.dev20260801+cu130", "~=2.15", True),
        ("2.15.0.dev20260801", "<2.15", False),
        ("2.15.0.dev20260801", "==2.15.0", False),
        ("2.15.0.dev20260801", ">=2.16", False),
        ("2.15.0.dev20260801", ">=2.15.0rc1", False),
        ("2.15.0rc2", ">=2.15.0rc1", True),
        ("4.0.0b4", ">=4.0", True),
        # VER-2: https://github.com/PriorLabs/TabPFN/issues/1300
        ("2.14.0", ">=2.6", True),
        ("12.10", ">=12.3", True),
        # VER-3: https://github.com/pytorch/pytorch/pull/60010
        ("12.0", ">=12.0.0", True),
        ("12.0", "==12.0.0", True),
        ("2.13.0+cu130", "==2.13.0", True),
        ("2.13.0+cu130", "<=2.13", True),
        ("unknown", "", True),
        ("unknown", ">=1", False),
    ],
)
def test_ver_versions_compare_as_versions(version: str, specifier: str, fits: bool) -> None:
    assert version_fits(version, specifier) is fits
    expected = [] if fits else ["package-version"]
    assert codes(package_reasons(f"thing{specifier}", software({"thing": version}), None)) == expected
