"""The lines that users read, over the whole table: short, whole, and without index or UUID."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from fabricated_hosts import capable, device, everything, host, software

from pytest_cudaenv.host.catalog import CATALOG
from pytest_cudaenv.host.devices import CudaDevice
from pytest_cudaenv.host.software import TorchBuild
from pytest_cudaenv.requirements import attention, hub_kernels, packages, precision, quantization, torch_build
from pytest_cudaenv.requirements.hub_kernels import HubKernel
from pytest_cudaenv.requirements.reason import LINE, Reason

KERNELS = [*hub_kernels.ARCHS, "kernels-community/flash-attn4"]
PAIRS = [
    {"kernels": k, "transformers": t} for k in ("0.16.0", "0.17.2", "0.18.2") for t in ("5.16.1", "5.22.2", "5.24.0")
]
DEVICES = [*map(device, CATALOG), capable(None, "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition")]
MIG = replace(capable((8, 0), "NVIDIA A100-SXM4-80GB MIG 1g.10gb"), mig_parent="GPU-1")
BUILDS = ["2.13.0+cpu", "2.13.0+rocm6.4", "2.13.0+cu126", "2.13.0+cu130"]


class Model:
    _supports_sdpa = _supports_flash_attn = _supports_flex_attn = False


def reasons_about(found: CudaDevice) -> Iterator[Reason]:
    for dtype in precision.DTYPES:
        yield from precision.dtype_reasons(dtype, found)
    for backend in (*attention.BACKENDS, *KERNELS):
        for dtype in (None, *precision.DTYPES):
            for have in (software(), everything()):
                yield from attention.device_reasons(backend, dtype, found, have)
        for head_dim in (4, 100, 160, 512):
            if reason := attention.head_dim_reason(backend, head_dim, found):
                yield reason
    for method in quantization.METHODS:
        yield from quantization.device_reasons(method, found)
    for build in (*BUILDS, TorchBuild("2.4.1+cu124", "12.4", arch_list=("sm_50",))):
        torch = build if isinstance(build, TorchBuild) else software(torch=build).torch
        yield from torch_build.device_reasons(found, torch)


def reasons_about_software() -> Iterator[Reason]:
    for torch in (None, "2.4.1+cu124", *BUILDS):
        have = software(dict.fromkeys(("flash-attn", "flash-attn-3", "flash-attn-4"), "0.0.0"), torch=torch)
        bare = software(torch=torch)
        for backend in attention.BACKENDS:
            for each in (
                have,
                bare,
                replace(have, modules=everything().modules),
                replace(bare, modules={"flash_attn.cute"}),
            ):
                yield from attention.software_reasons(backend, each, None)
        yield from torch_build.nccl_reasons(bare.torch)
        for driver_cuda in ((11, 4), (12, 8)):
            found = host("rtxpro6000", software=bare, driver_cuda=driver_cuda, driver="470.256.02")
            yield from torch_build.host_reasons(found)
    for method in quantization.METHODS:
        yield from quantization.device_reasons(method, None)
        for version in (None, "0.0.1"):
            names = [r.name for p in quantization.METHODS[method].packages for r in quantization._requirements(p.specs)]
            yield from quantization.software_reasons(method, software({n: version for n in names if version}), None)
    for pair in ({}, *PAIRS):
        yield from hub_kernels.pair_reasons(
            software(pair, environ={"USE_HUB_KERNELS": "0", "DISABLE_KERNEL_MAPPING": "1"})
        )
        yield from hub_kernels.pair_reasons(software(pair, environ={"DISABLE_KERNEL_MAPPING": "yes"}))
    for repo in KERNELS:
        yield from hub_kernels.software_reasons(HubKernel(repo), software(environ={"HF_HUB_OFFLINE": "1"}))
        yield from hub_kernels.software_reasons(
            HubKernel(repo), software(environ={"LOCAL_KERNELS": f"{repo}=/nowhere"})
        )
    for backend in attention.BACKENDS:
        yield from attention.device_reasons(backend, "bfloat16", None, everything())
        yield from attention.model_reasons(backend, Model)
    yield from packages.package_reasons("flash-attn>=2.5 | xformers", software({"flash-attn": "2.3.0"}), None)


TOLD = {str(r): r for found in DEVICES for r in reasons_about(found)} | {str(r): r for r in reasons_about_software()}


def test_there_are_many() -> None:
    assert len({r.code for r in TOLD.values()}) >= 20


def faults(reason: Reason) -> Iterator[str]:
    """What is wrong with the text of a reason."""
    told = f"{reason.need}; have {reason.have}"
    if len(told) > LINE or "…" in told:
        yield "too long"
    if re.search(r"GPU-|MIG-|cuda:|\bindex\b", told):
        yield "names an index or UUID"
    if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)+", reason.code):
        yield "its code is not lower-case with dashes"
    if not re.fullmatch(r"[A-Z`].*\.", reason.remedy):
        yield "its remedy is not one sentence on one line"


def test_a_line_is_short_whole_and_names_no_index() -> None:
    assert {line: list(faults(reason)) for line, reason in TOLD.items() if any(faults(reason))} == {}


def test_names_that_are_too_long_are_cut() -> None:
    for reason in reasons_about(MIG):
        assert len(f"{reason.need}; have {reason.have}") <= LINE


def test_errors_of_imports_are_cut_in_the_line_and_whole_in_the_remedy() -> None:
    error = (
        "ImportError: /opt/venv/lib/python3.12/site-packages/flash_attn_2_cuda.so: undefined symbol: _ZN3c105ErrorC2E"
    )
    found = everything()
    for reason in (
        *attention.software_reasons("flash_attention_2", found, lambda _: error),
        *packages.package_reasons("flash-attn>=2.3.3", found, lambda _: error),
        *quantization.software_reasons("gguf", software({"kernels": "1"}), lambda _: error),
    ):
        assert reason.code.endswith("-broken")
        assert len(f"{reason.need}; have {reason.have}") == LINE
        assert error in reason.remedy
