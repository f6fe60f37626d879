"""What a test changes of a process's kernels is gone after it, whichever way it was changed."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("kernels")
pytest.importorskip("transformers")

from pytest_cudaenv.verdict.hub_engine import HubKernels
from pytest_cudaenv.verdict.kernel_mapping import mapping_of
from pytest_cudaenv.verdict.kernel_state import KernelState, Parked
from tests.hub_kernels.tiny import FULL, KERNELS, ROOT, TINY, refuse, seed, tiny_llama


def traces() -> dict[str, Any]:
    """Everything that is known to leak, as plain data."""
    import transformers.modeling_flash_attention_utils as flash
    from kernels import get_loaded_kernels
    from kernels.layer import globals as mapping
    from kernels.layer import layer, repos
    from transformers import conversion_mapping, masking_utils, modeling_utils, monkey_patching
    from transformers.integrations import hub_kernels
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
    from transformers.utils import kernel_config

    return {
        "function": "forward" in apply_rotary_pos_emb.__dict__,
        "mapping": sorted(mapping._KERNEL_MAPPING.get()),
        "cached layers": len(layer._CACHED_LAYER),
        "capability": repos._find_capability.cache_info().currsize,
        "loaded": sorted(kernel.metadata.id for kernel in get_loaded_kernels()),
        "modules": sorted(name for name in sys.modules if "tiny_layers" in name or "demo_attn" in name),
        "default mapping": hub_kernels._KERNEL_MAPPING_CACHE is None,
        "kernel modules": dict(hub_kernels._KERNEL_MODULE_MAPPING),
        "attention": sorted(name for name in modeling_utils.ALL_ATTENTION_FUNCTIONS if "/" in name),
        "masks": sorted(name for name in masking_utils.ALL_MASK_ATTENTION_FUNCTIONS if "/" in name),
        "flash": (flash._loaded_implementation, flash._flash_fn),
        "patches": dict(monkey_patching._monkey_patch_mapping_cache),
        "conversions": conversion_mapping._checkpoint_conversion_mapping_cache is None,
        "devices": list(kernel_config.KERNELS_SUPPORTED_DEVICE_TYPES),
        "environment": os.environ.get("LOCAL_KERNELS"),
        "set_use_kernels": modeling_utils.PreTrainedModel.set_use_kernels.__qualname__,
        "replace": layer._replace_forward.__qualname__,
        "kernelize": hub_kernels._kernels_kernelize.__qualname__,
        "get_kernel": hub_kernels.get_kernel.__qualname__,
    }


def on_and_left(engine: HubKernels, model: Any, ids: Any) -> None:
    engine.on(model, FULL)


def registered(engine: HubKernels, model: Any, ids: Any) -> None:
    from kernels import register_kernel_mapping

    register_kernel_mapping(mapping_of(FULL, "cpu", ROOT))


def registered_anew(engine: HubKernels, model: Any, ids: Any) -> None:
    from kernels import register_kernel_mapping

    register_kernel_mapping(mapping_of(FULL, "cpu", ROOT), inherit_mapping=False)


def kernelized(engine: HubKernels, model: Any, ids: Any) -> None:
    from kernels import Mode, kernelize, register_kernel_mapping

    register_kernel_mapping(mapping_of(FULL, "cpu", ROOT))
    kernelize(model, mode=Mode.INFERENCE, device="cpu")


def by_transformers(engine: HubKernels, model: Any, ids: Any) -> None:
    model.set_use_kernels(True)


def overridden(engine: HubKernels, model: Any, ids: Any) -> None:
    engine.override("org/tiny", TINY)
    engine.on(model, {"RMSNorm": "org/tiny:RMSNorm@v1"})


def attended(engine: HubKernels, model: Any, ids: Any) -> None:
    engine.override("org/attn", KERNELS / "demo-attn")
    engine.attention(model, "org/attn")
    model(ids)


def watched(engine: HubKernels, model: Any, ids: Any) -> None:
    engine.watch(allow_fallback=FULL)
    model.set_use_kernels(True)


def patched_registries(engine: HubKernels, model: Any, ids: Any) -> None:
    import torch
    from transformers import AttentionInterface
    from transformers.monkey_patching import register_patch_mapping
    from transformers.utils import kernel_config

    kernel_config.KERNELS_SUPPORTED_DEVICE_TYPES.append("cpu")
    register_patch_mapping({"LlamaMLP": torch.nn.Linear}, overwrite=True)
    AttentionInterface.register("org/mine", lambda *a: None)


WAYS = [
    on_and_left, registered, registered_anew, kernelized, by_transformers, overridden, attended, watched,
    patched_registries,
]  # fmt: skip


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_nothing_is_left(way: Callable[[HubKernels, Any, Any], None], model: Any, ids: Any) -> None:
    before = traces()
    forwards = [dict(module.__dict__) for module in model.modules()]
    engine = HubKernels(refuse, root=ROOT)
    engine.begin()
    try:
        way(engine, model, ids)
        changed = traces()
    finally:
        engine.end()
    assert changed != before  # or the test would prove nothing
    assert traces() == before
    for module, own in zip(model.modules(), forwards, strict=True):
        assert module.__dict__.keys() == own.keys()
    assert not model.use_kernels
    assert model.config._attn_implementation == "eager"


def test_what_was_there_before_stays(model: Any, ids: Any) -> None:
    """A mapping and a kernel of the suite's own, from before the test."""
    outer = KernelState()
    try:
        kernelized(None, model, ids)  # type: ignore[arg-type]
        before, norm = traces(), model.model.norm.__dict__["forward"]
        engine = HubKernels(refuse, root=ROOT)
        engine.begin()
        with engine.off(model) as off:
            assert not off.replaced
            model(ids)
        by_transformers(engine, model, ids)
        engine.end()
        assert traces() == before
        assert model.model.norm.__dict__["forward"] is norm
    finally:
        outer.restore()


def test_threads_see_the_mapping_as_it_was(model: Any) -> None:
    """They see the context variable's default, which `register_kernel_mapping` changes in place."""
    import contextvars

    from kernels.layer.globals import _KERNEL_MAPPING

    state = KernelState()
    registered(None, model, None)  # type: ignore[arg-type]
    state.restore()
    assert not contextvars.Context().run(_KERNEL_MAPPING.get)


def test_a_kernel_is_imported_once_for_all_tests_of_a_process(patched: Callable[..., Path]) -> None:
    """Its operators are registered with torch for good: a second import can fail."""
    once = "import torch\nassert not hasattr(torch, '_tiny_once')\ntorch._tiny_once = True\nfrom . import layers"
    folder = patched(TINY, text=("__init__.py", "from . import layers", once), metadata={"id": "_tiny_layers_once"})
    import torch

    parked = Parked()
    try:
        for _ in range(3):
            engine = HubKernels(refuse, root=ROOT, parked=parked)
            engine.on(tiny_llama(), {"RMSNorm": f"{folder}:RMSNorm"})
            assert "_tiny_layers_once.layers" in sys.modules
            engine.end()
            assert "_tiny_layers_once.layers" not in sys.modules
    finally:
        del torch._tiny_once


def test_a_kernel_that_was_built_anew_is_imported_anew(patched: Callable[..., Path]) -> None:
    import torch

    folder = patched(TINY)
    file = folder / "build" / "torch-universal" / "_ops.py"
    parked, x = Parked(), torch.ones(2)
    for expected in (torch.nn.functional.silu(x), x * 2):
        engine, model = HubKernels(refuse, root=ROOT, parked=parked), tiny_llama()
        engine.on(model, {"SiLU": f"{folder}:SiLU"})
        assert torch.allclose(model.model.layers[0].mlp.act_fn(x), expected)
        engine.end()
        text = file.read_text().replace("return _SiLU.apply(x) if _on_cuda(x) else F.silu(x)", "return x * 2.0")
        file.write_text(text)


def test_a_version_is_looked_up_anew_in_each_test(model: Any, offline: Path, patched: Callable[..., Path]) -> None:
    """`kernels` remembers the commit of a version for as long as the process lives."""
    files = []
    for folder in (TINY, patched(TINY, text=("_ops.py", "The operators.", "Other operators."))):
        commit = seed(offline, "org/tiny", folder)
        engine = HubKernels(refuse, root=ROOT)
        report = engine.on(model, {"SiLU": "org/tiny:SiLU@v1"})
        files.append(report.replaced[0].file)
        engine.end()
        assert commit in str(files[-1])
    assert files[0] != files[1]
