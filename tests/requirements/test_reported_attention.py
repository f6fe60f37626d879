"""Failures of attention backends that people reported, each with its issue (T16)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fabricated_hosts import MODULES, PACKAGES, capable, codes, device, everything, software

from pytest_cudaenv.host.devices import Capability
from pytest_cudaenv.host.software import Software, installed_software
from pytest_cudaenv.requirements import attention, hub_kernels, packages
from pytest_cudaenv.requirements.hub_kernels import HubKernel
from pytest_cudaenv.requirements.reason import Rank

FA2, FA3, FA4 = "flash_attention_2", "flash_attention_3", "flash_attention_4"
UNDEFINED = "undefined symbol: _ZN3c105ErrorC2ENS_14SourceLocationE"

Install = Callable[..., Software]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Puts files and distributions on the path, and reads the software from there as a session does."""

    def install(files: dict[str, str], **distributions: str) -> Software:
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        for name, version in distributions.items():
            info = tmp_path / f"{name}-{version}.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        monkeypatch.syspath_prepend(tmp_path)
        return installed_software()

    packages.try_import.cache_clear()
    yield install
    packages.try_import.cache_clear()
    for name in [m for m in sys.modules if m.partition(".")[0] in {"flash_attn", "flash_attn_interface"}]:
        del sys.modules[name]


def test_fa1_installed_and_the_import_fails(install: Install) -> None:
    """https://github.com/huggingface/transformers/issues/31793"""
    found = install({"flash_attn/__init__.py": f"raise ImportError({UNDEFINED!r})"}, flash_attn="2.8.3")
    assert attention.software_reasons(FA2, found, None) == []
    [reason] = attention.software_reasons(FA2, found, packages.try_import)
    assert (reason.code, reason.rank) == ("attn-broken", Rank.BROKEN)
    assert reason.have.startswith("undefined symbol")
    assert f"ImportError: {UNDEFINED}" in reason.remedy


def test_fa2_built_for_another_torch() -> None:
    """https://github.com/Dao-AILab/flash-attention/issues/1644"""
    found = everything(torch=software(torch="2.13.0+cu130").torch)
    [reason] = attention.software_reasons(FA2, found, lambda _: f"ImportError: flash_attn_2_cuda.so: {UNDEFINED}")
    assert "install a build of flash-attn for torch 2.13.0+cu130" in reason.remedy


def test_fa3_turing() -> None:
    """https://github.com/Dao-AILab/flash-attention/issues/762"""
    [reason] = attention.device_reasons(FA2, None, device("t4"), everything())
    assert str(reason) == "[attn-capability] FA2 needs capability 8.0; have 7.5 (T4)"


@pytest.mark.parametrize(
    ("capability", "community", "hopper_only"),
    [
        ((8, 0), [], ["kernels-arch"]),
        ((8, 6), [], ["kernels-arch"]),
        ((8, 9), [], ["kernels-arch"]),
        ((9, 0), [], []),
        ((10, 0), ["kernels-arch"], ["kernels-arch"]),
        ((12, 0), ["kernels-arch"], ["kernels-arch"]),
    ],
)
def test_fa4_krn4_each_kernel_has_its_own_range(
    capability: Capability, community: list[str], hopper_only: list[str]
) -> None:
    """https://github.com/PKU-YuanGroup/Helios/pull/28 https://github.com/karpathy/nanochat/pull/540"""
    found = software({"kernels": "0.17.2", "transformers": "5.22.2"})
    where = capable(capability)
    for repo, expected in [
        ("kernels-community/flash-attn3", community),
        ("kernels-community/vllm-flash-attn3@main", community),
        ("varunneal/flash-attention-3", hopper_only),
    ]:
        assert attention.software_reasons(repo, found, None) == []
        assert codes(attention.device_reasons(repo, None, where, found)) == expected
        kernel = HubKernel(repo.partition("@")[0])
        assert codes(hub_kernels.device_reasons(kernel, where, found)) == expected


@pytest.mark.parametrize("name", ["NVIDIA H200", "NVIDIA H20", "NVIDIA H800", "NVIDIA GH200 480GB", "NVIDIA L20X"])
def test_fa5_hopper_is_a_capability_and_no_name(name: str) -> None:
    """https://github.com/amap-cvlab/ABot-World/pull/13"""
    assert attention.device_reasons(FA3, None, capable((9, 0), name), everything()) == []
    assert codes(attention.device_reasons(FA3, None, capable((8, 9), name), everything())) == ["attn-capability"]


def test_fa6_cute_shipped_with_flash_attention_2(install: Install) -> None:
    """https://github.com/allenai/open-instruct/pull/1716"""
    function = "def flash_attn_func(): ..."
    found = install({"flash_attn/__init__.py": function, "flash_attn/cute/__init__.py": function}, flash_attn="2.8.3")
    assert attention.software_reasons(FA2, found, packages.try_import) == []
    [reason] = attention.software_reasons(FA4, found, packages.try_import)
    assert str(reason) == "[attn-missing] FA4 needs flash-attn-4; have flash_attn.cute of flash-attn"


def test_fa6_the_other_way_round(install: Install) -> None:
    """flash-attn-4 alone leaves a folder flash_attn without a flash_attn_func."""
    found = install({"flash_attn/cute/__init__.py": "def flash_attn_func(): ..."}, flash_attn_4="4.0.0b4")
    assert attention.software_reasons(FA4, found, packages.try_import) == []
    assert codes(attention.software_reasons(FA2, found, packages.try_import)) == ["attn-missing"]


def test_fa7_module_without_a_distribution(install: Install) -> None:
    """https://github.com/huggingface/transformers/pull/45524"""
    found = install({"flash_attn/__init__.py": "def flash_attn_func(): ..."})
    assert attention.software_reasons(FA2, found, packages.try_import) == []
    assert attention.note(FA2, found) == (
        "flash_attn is importable, but no distribution flash-attn is installed: transformers will not use it"
    )
    assert attention.note(FA2, everything()) is None
    assert attention.note(FA2, software()) is None
    assert attention.note("sdpa", software()) is None


def test_fa8_placeholder_and_layouts(install: Install) -> None:
    """https://github.com/MakazhanAlpamys/Soup/issues/334"""
    placeholder = install({}, flash_attn_3="0.0.0")
    [reason] = attention.software_reasons(FA3, placeholder, None)
    assert str(reason) == "[attn-missing] FA3 needs flash-attn-3; have 0.0.0 without its module"
    for module in ("flash_attn_interface", "flash_attn_3"):
        assert attention.software_reasons(FA3, software({"flash-attn-3": "3.0.0b1"}, {module}), None) == []
        assert attention.software_reasons(FA3, software({}, {module}), None) == []


@pytest.mark.parametrize(
    ("capability", "fa2", "fa3", "fa4"),
    [
        ((10, 0), [], ["attn-capability"], []),
        ((10, 3), [], ["attn-capability"], []),
        ((11, 0), [], ["attn-capability"], []),
        ((12, 0), [], ["attn-capability"], []),
        ((12, 1), [], ["attn-capability"], []),
        ((13, 0), [], ["attn-capability"], ["attn-capability"]),
    ],
)
def test_fa9_blackwell_is_three_families(
    capability: Capability, fa2: list[str], fa3: list[str], fa4: list[str]
) -> None:
    """https://github.com/Dao-AILab/flash-attention/issues/1638 https://github.com/vllm-project/vllm/pull/46002"""
    where = capable(capability)
    found = [codes(attention.device_reasons(name, None, where, everything())) for name in (FA2, FA3, FA4)]
    assert found == [fa2, fa3, fa4]


def test_fa10_an_unknown_build_of_fa3_is_for_hopper() -> None:
    """https://github.com/facebookresearch/xformers/issues/1338"""
    found = software({}, {"flash_attn_interface"})
    assert attention.software_reasons(FA3, found, None) == []
    [reason] = attention.device_reasons(FA3, None, device("l40s"), found)
    assert str(reason) == "[attn-capability] FA3 needs sm_90; have 8.9 (L40S)"


def test_fa11_only_public_names_are_asked_for() -> None:
    """https://github.com/unslothai/unsloth/issues/1555"""
    asked: list[str] = []
    for name in attention.BACKENDS:
        attention.software_reasons(name, everything(), asked.append)  # type: ignore[arg-type]  # answers None: it works
    assert asked == [
        "flash_attn:flash_attn_func",
        "flash_attn_interface:flash_attn_func",
        "flash_attn.cute:flash_attn_func",
    ]


@pytest.mark.parametrize("capability", [(8, 6), (8, 9), (9, 0), (12, 1)])
def test_fa12_ranges_and_not_equality(capability: Capability) -> None:
    """https://github.com/lucidrains/denoising-diffusion-pytorch/issues/328"""
    assert attention.device_reasons(FA2, None, capable(capability), everything()) == []


def test_fa13_the_gate_that_transformers_never_reaches() -> None:
    """transformers asks for no capability once the package is installed."""
    assert codes(attention.device_reasons(FA3, None, device("t4"), everything())) == ["attn-capability"]


def test_fa14_fp8_in_fa4_and_cuda_versions_as_numbers() -> None:
    """https://github.com/sgl-project/sglang/issues/23985"""
    [reason] = attention.device_reasons(FA4, "float8_e4m3fn", device("rtx5090"), everything())
    assert str(reason) == "[attn-dtype] FA4 in fp8_e4m3 needs 10.x; have 12.0 (RTX 5090)"
    assert packages.version_fits("12.10", ">=12.3")


def test_fa15_a_kernel_that_breaks_later_is_not_called_unavailable() -> None:
    """https://github.com/huggingface/kernels-community/issues/312"""
    assert attention.software_reasons(FA2, everything(), lambda _: None) == []


def test_too_old() -> None:
    [reason] = attention.software_reasons(FA2, software({"flash-attn": "2.3.2"}, MODULES), None)
    assert str(reason) == "[attn-version] FA2 needs flash-attn>=2.3.3; have 2.3.2"
    [reason] = attention.software_reasons("flex_attention", software(torch="2.4.1+cu124"), None)
    assert str(reason) == "[attn-version] flex needs torch>=2.5; have 2.4.1+cu124"


@pytest.mark.parametrize("name", ["eager", "sdpa", "flex_attention"])
def test_backends_that_are_torch(name: str) -> None:
    assert codes(attention.software_reasons(name, software(torch=None), None)) == ["attn-missing"]


def test_missing_names_both_ways() -> None:
    [reason] = attention.software_reasons(FA3, software(), None)
    assert str(reason) == "[attn-missing] FA3 needs flash-attn-3; have none"
    assert "pip install 'git+https://github.com/Dao-AILab/flash-attention#subdirectory=hopper'" in reason.remedy
    assert "kernels-community/vllm-flash-attn3" in reason.remedy


def test_assumed_packages_work_and_are_not_imported() -> None:
    assumed = software().assuming({"flash_attn_3": "3.0.0", "flash-attn": ""})

    def never(target: str) -> str:
        raise AssertionError(target)

    assert attention.software_reasons(FA3, assumed, never) == []
    assert attention.software_reasons(FA2, assumed, never) == []
    too_old = software().assuming({"flash-attn": "2.0"})
    assert codes(attention.software_reasons(FA2, too_old, never)) == ["attn-version"]


def test_unknown_capability_is_an_error_and_no_skip() -> None:
    for name in (FA2, FA3, FA4, "flex_attention"):
        [reason] = attention.device_reasons(name, None, capable(None), everything())
        assert (reason.code, reason.is_error) == ("cuda-unknown", True)
    assert attention.device_reasons("sdpa", None, capable(None), everything()) == []


def test_packages_in_the_table_are_those_of_the_fabricated_host() -> None:
    assert {b.distribution for b in attention.BACKENDS.values()} == {"torch", *PACKAGES}
