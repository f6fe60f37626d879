"""The traps of kernels 0.17 and transformers 5.22: each with the outcome that a test has to have."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("kernels")
pytest.importorskip("transformers")

from pytest_cudaenv.verdict.hub_engine import HubKernels
from pytest_cudaenv.verdict.kernel_errors import HubKernelError, KernelFaultError
from pytest_cudaenv.verdict.kernel_report import KernelReportError
from tests.hub_kernels.tiny import FULL, KERNELS, ODD, ROOT, TINY, Refused, refuse, seed, tiny_llama

NORM = {"RMSNorm": f"{TINY}:RMSNorm"}


# It works -------------------------------------------------------------------------------------------------------


def test_everything_is_replaced_executed_and_equal(engine: Any, model: Any, ids: Any) -> None:
    import torch

    with torch.no_grad():
        off = model(ids).logits
        with engine.on(model, FULL) as report:
            on = model(ids).logits
    torch.testing.assert_close(on, off)
    report.assert_replaced("RMSNorm", "SiLU", "rotary_pos_emb", executed=True)
    report.assert_no_fallback()
    counts = {name: [row.calls for row in report.rows if row.layer_name == name] for name in FULL}
    assert counts == {"RMSNorm": [1] * 5, "SiLU": [1] * 2, "rotary_pos_emb": [2]}
    for row in report.rows:
        assert row.variant == "torch-universal"
        assert row.file is not None
        assert Path(row.file).is_relative_to(TINY)
        assert row.mode == "INFERENCE"


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_compare_forward_and_backward(engine: Any, ids: Any, name: str) -> None:
    import torch

    model = tiny_llama().to(getattr(torch, name)).train()
    report = engine.compare(model, lambda m: m(ids, labels=ids), backward=True, mapping=FULL)
    assert report.modes == ["TRAINING"]
    assert engine.comparisons[0]["ratio"] <= 1
    assert engine.comparisons[0]["checked"] > sum(p.numel() for p in model.parameters())
    assert all(p.grad is None for p in model.parameters())


def test_a_kernel_with_other_numbers_fails(engine: Any, model: Any, ids: Any) -> None:
    with pytest.raises(KernelFaultError, match=r"\[kernels-parity\]"):
        engine.compare(model, lambda m: m(ids), mapping={"RMSNorm": f"{ODD}:Wrong"})


def test_a_kernel_that_detaches_fails_the_comparison(engine: Any, model: Any, ids: Any) -> None:
    """It claims a backward, as absent means true; training with it raises nothing and loses 20 of 21 gradients."""
    with pytest.raises(KernelFaultError, match=r"\[kernels-no-gradient\] 20 gradients"):
        engine.compare(
            model.train(), lambda m: m(ids, labels=ids), backward=True, mapping={"RMSNorm": f"{ODD}:Detached"}
        )


def test_a_comparison_of_nothing_is_an_error(engine: Any, model: Any) -> None:
    with pytest.raises(HubKernelError, match=r"\[kernels-compare\]"):
        engine.compare(model, lambda _: None, mapping=FULL)


def test_a_replaced_layer_that_never_runs_is_no_proof(engine: Any, model: Any, ids: Any) -> None:
    with pytest.raises(KernelReportError, match=r"\[kernels-not-executed\]"):
        engine.compare(model, lambda m: m.lm_head(m.get_input_embeddings()(ids)), mapping=FULL)


def test_train_and_eval_switch_kernels(engine: Any, model: Any) -> None:
    mapping = {"RMSNorm": {"inference": f"{ODD}:InferenceOnly", "training": f"{TINY}:RMSNorm"}}
    with engine.on(model, mapping) as report:
        files = [row.repository for row in report.replaced]
        model.train()
        files += [row.repository for row in report.replaced]
        model.eval()
    assert report.modes == ["INFERENCE", "TRAINING", "INFERENCE"]
    assert files == [str(ODD)] * 5 + [str(TINY)] * 5
    assert "train" not in model.__dict__


def test_train_without_a_kernel_for_it_is_an_error(engine: Any, model: Any) -> None:
    with engine.on(model, {"RMSNorm": {"inference": f"{TINY}:RMSNorm"}}) as report:
        with pytest.raises(HubKernelError, match=r"\[kernels-mode\]"):
            model.train()
        report.check = None


def test_transformers_own_train_and_eval_are_watched(engine: Any, model: Any) -> None:
    from kernels import use_kernel_mapping

    from pytest_cudaenv.verdict.kernel_mapping import mapping_of

    with engine.watch() as report, use_kernel_mapping(mapping_of(FULL, "cpu", ROOT)):
        model.set_use_kernels(True)
        model.train()
        model.eval()
    assert report.modes == ["INFERENCE", "TRAINING", "INFERENCE"]
    report.assert_replaced("RMSNorm", "SiLU", "rotary_pos_emb", executed=False)


def test_from_pretrained_is_watched(engine: Any, model: Any, ids: Any, tmp_path: Path) -> None:
    from kernels import use_kernel_mapping
    from transformers import LlamaForCausalLM

    from pytest_cudaenv.verdict.kernel_mapping import mapping_of

    model.save_pretrained(tmp_path / "model")
    with engine.watch() as report, use_kernel_mapping(mapping_of(FULL, "cpu", ROOT)):
        loaded = LlamaForCausalLM.from_pretrained(tmp_path / "model", use_kernels=True, attn_implementation="eager")
        loaded(ids)
    report.assert_no_fallback()
    report.assert_replaced()


# Nothing is left ------------------------------------------------------------------------------------------------


def test_function_kernels_do_not_reach_other_models(engine: Any, model: Any, ids: Any) -> None:
    other = tiny_llama()
    with engine.on(model, FULL):
        with engine.off(other) as off:
            other(ids)
        off.assert_no_fallback()
        assert not off.replaced


def test_off_finds_a_kernel_that_somebody_puts_back(engine: Any, model: Any) -> None:
    off = engine.off(model)
    engine.on(model, NORM)
    with pytest.raises(KernelReportError, match=r"\[kernels-not-off\]"):
        off.assert_replaced("RMSNorm")


def test_replacing_is_all_or_nothing(engine: Any, model: Any) -> None:
    with pytest.raises(HubKernelError):
        engine.on(model, FULL | {"SiLU": f"{ODD}:Nope"})
    assert all("forward" not in module.__dict__ for module in model.modules())


def test_on_within_on_ends_as_it_began(engine: Any, model: Any) -> None:
    with engine.on(model, NORM):
        before = model.model.norm.__dict__["forward"].__func__
        with engine.on(model, {"RMSNorm": f"{ODD}:InferenceOnly"}):
            assert model.model.norm.__dict__["forward"].__func__ is not before
        assert model.model.norm.__dict__["forward"].__func__ is before
    assert "forward" not in model.model.norm.__dict__


def test_a_copy_of_a_model_with_kernels_runs_its_own_weights(engine: Any, model: Any, ids: Any) -> None:
    import torch

    with engine.on(model, NORM), torch.no_grad():
        twin = copy.deepcopy(model)
        twin.model.norm.weight.zero_()
        assert float(twin(ids).logits.abs().max()) == 0
        assert float(model(ids).logits.abs().max()) > 0


# Which kernel ---------------------------------------------------------------------------------------------------


def test_one_id_in_two_folders_runs_each_its_own(engine: Any, patched: Callable[..., Path]) -> None:
    """`kernels` alone gives the second folder the first one's submodules."""
    import torch

    twice = patched(TINY, text=("_ops.py", "return _SiLU.apply(x) if _on_cuda(x) else F.silu(x)", "return x * 2"))
    models = [tiny_llama(), tiny_llama()]
    x = torch.ones(3)
    with engine.on(models[0], {"SiLU": f"{TINY}:SiLU"}), engine.on(models[1], {"SiLU": f"{twice}:SiLU"}) as second:
        assert torch.equal(models[1].model.layers[0].mlp.act_fn(x), x * 2)
        assert torch.allclose(models[0].model.layers[0].mlp.act_fn(x), torch.nn.functional.silu(x))
    assert {row.repository for row in second.replaced} == {str(twice)}


def test_kernels_alone_still_mixes_them_up(patched: Callable[..., Path]) -> None:
    """The trap itself; the test above would prove nothing if `kernels` were mended."""
    import sys

    import torch
    from kernels import get_local_kernel
    from kernels.importer import _loaded_kernels

    renamed = {"id": "_tiny_layers_trap"}
    first = patched(TINY, name="first", metadata=renamed)
    changed = ("_ops.py", "return _SiLU.apply(x) if _on_cuda(x) else F.silu(x)", "return x * 2")
    second = patched(TINY, name="second", metadata=renamed, text=changed)
    try:
        get_local_kernel(first)
        assert not torch.equal(get_local_kernel(second).silu(torch.ones(3)), torch.full((3,), 2.0))
    finally:
        for path in [p for p in _loaded_kernels if p.is_relative_to(first.parent)]:
            del _loaded_kernels[path]
        for name in [n for n in sys.modules if n.partition(".")[0] == "_tiny_layers_trap"]:
            del sys.modules[name]


def test_a_second_class_has_its_arguments_checked_too(model: Any) -> None:
    """`kernels` checks a layer once in a process, against the class that comes first."""
    import torch
    from kernels import use_kernel_forward_from_hub

    @use_kernel_forward_from_hub("RMSNorm")
    class Other(torch.nn.Module):
        def forward(self, a: Any, b: Any) -> Any:
            return a

    for target, fits in ((model, True), (Other(), False)):
        engine = HubKernels(refuse, root=ROOT)
        try:
            if fits:
                engine.on(target, NORM)
            else:
                with pytest.raises(KernelFaultError, match=r"\[kernels-bad-layer\]"):
                    engine.on(target, NORM, device="cpu", mode="inference")
        finally:
            engine.end()


def test_an_override_reaches_a_layer_at_a_version(engine: Any, model: Any, ids: Any) -> None:
    engine.override("org/tiny", TINY)
    with engine.on(model, {"RMSNorm": "org/tiny:RMSNorm@v7", "SiLU": "org/tiny:SiLU@main"}) as report:
        model(ids)
    report.assert_replaced("RMSNorm", "SiLU")
    assert {(row.layer_name, row.repository, row.revision) for row in report.replaced} == {
        ("RMSNorm", "org/tiny", "v7"),
        ("SiLU", "org/tiny", "main"),
    }
    assert all(Path(str(row.file)).is_relative_to(TINY) for row in report.replaced)


def test_an_override_that_is_no_folder(engine: Any, tmp_path: Path) -> None:
    with pytest.raises(HubKernelError, match=r"\[kernels-local\]"):
        engine.override("org/tiny", tmp_path / "nowhere")
    with pytest.raises(HubKernelError, match=r"\[kernels-no-build\]"):
        engine.local(tmp_path / "nowhere", "RMSNorm")


def test_a_cached_version_is_found_offline(engine: Any, model: Any, seeded: Callable[..., str]) -> None:
    commit = seeded("org/tiny", TINY)
    with engine.on(model, {"RMSNorm": "org/tiny:RMSNorm@v1"}) as report:
        pass
    assert {(row.repository, row.revision) for row in report.replaced} == {("org/tiny", "v1")}
    assert commit in str(report.replaced[0].file)


def test_a_cache_without_the_ref_is_a_skip(engine: Any, model: Any, seeded: Callable[..., str]) -> None:
    """As downloading with version=1 leaves it."""
    seeded("org/tiny", TINY, with_refs=False)
    with pytest.raises(Refused) as caught:
        engine.on(model, {"RMSNorm": "org/tiny:RMSNorm@v1"})
    assert str(caught.value) == "[kernels-offline] needs RMSNorm; have offline, org/tiny@v1 not cached"
    with pytest.raises(Refused, match=r"have offline, org/tiny@main not cached"):
        engine.on(model, {"RMSNorm": "org/tiny:RMSNorm@main"})


def test_locked(engine: Any, model: Any, seeded: Callable[..., str], tmp_path: Path) -> None:
    commit = seeded("org/tiny", TINY)
    lock = tmp_path / "kernels.lock"
    entry = {"dependency": {"repo-id": "org/tiny", "version": 1}, "lock": {"commit": commit}}
    lock.write_text(json.dumps([entry]))
    with engine.on(model, {"RMSNorm": engine.locked("org/tiny:RMSNorm", lock)}) as report:
        pass
    assert {(row.repository, row.revision) for row in report.replaced} == {("org/tiny", commit)}
    for text in ("[]", json.dumps([{"repo_id": "org/tiny", "sha": commit, "variants": {}}])):
        lock.write_text(text)
        with pytest.raises(HubKernelError, match=r"\[kernels-lock\]"):
            engine.on(model, {"RMSNorm": engine.locked("org/tiny:RMSNorm", lock)})
    with pytest.raises(HubKernelError, match=r"\[kernels-lock\]"):
        engine.locked("org/tiny:RMSNorm", tmp_path / "absent.lock")


# What a kernel must be ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", ["BadInit", "BadMember", "BadNumber", "BadKind", "NotAModule"])
def test_a_layer_that_is_none(engine: Any, model: Any, layer: str) -> None:
    with pytest.raises(KernelFaultError, match=r"\[kernels-bad-layer\]"):
        engine.on(model, {"RMSNorm": f"{ODD}:{layer}"}, allow_fallback={"SiLU"})


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"drop": ["id"]}, "kernels-metadata"),
        ({"metadata": {"kernels-minver": "99.0.0"}}, "kernels-version"),
        ({"metadata": {"python-depends": ["einops"]}}, "kernels-dependency"),
        ({"text": ("__init__.py", "from . import layers", "raise OSError('no.so')")}, "kernels-import"),
        ({"text": ("__init__.py", "from . import layers", "")}, "kernels-no-layer"),
        ({"variant": "torch29-cxx11-cpu-x86_64-linux"}, "kernels-variant"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_build_that_does_not_load(
    engine: Any, model: Any, patched: Callable[..., Path], changes: dict[str, Any], code: str
) -> None:
    if code == "kernels-dependency":
        from importlib.util import find_spec

        if find_spec("einops") is not None:
            pytest.skip("einops is installed")
    folder = patched(TINY, **changes)
    skips = {"kernels-version", "kernels-dependency", "kernels-variant"}
    with pytest.raises(Refused if code in skips else (HubKernelError, KernelFaultError)) as caught:
        engine.on(model, {"RMSNorm": f"{folder}:RMSNorm"})
    assert [code] == (caught.value.codes if isinstance(caught.value, Refused) else [caught.value.code])  # type: ignore[attr-defined]


def test_a_folder_without_a_build(engine: Any, model: Any, tmp_path: Path) -> None:
    with pytest.raises(HubKernelError, match=r"\[kernels-no-build\]"):
        engine.on(model, {"RMSNorm": engine.local(tmp_path, "RMSNorm")})


def test_claims_are_held(engine: Any, model: Any) -> None:
    import torch

    norm, x = model.model.norm, torch.randn(3, 32)
    claims = engine.check_layer(f"{TINY}:RMSNorm", norm, x, backward=True, compile=True)
    assert claims == {"has_backward": True, "can_torch_compile": True}
    assert engine.check_layer(f"{ODD}:InferenceOnly", norm, x)["has_backward"] is False
    for layer, code in (
        ("Detached", "no-gradient"),
        ("Breaks", "claim"),
        ("Wrong", "parity"),
        ("BadKind", "bad-layer"),
    ):
        with pytest.raises(KernelFaultError, match=rf"\[kernels-{code}\]"):
            engine.check_layer(f"{ODD}:{layer}", norm, x)
    with pytest.raises(KernelFaultError, match="does not claim has_backward"):
        engine.check_layer(f"{ODD}:InferenceOnly", norm, x, backward=True)


def test_a_compiled_model_runs_its_kernels(engine: Any, model: Any, ids: Any) -> None:
    import torch

    with engine.on(model, {"RMSNorm": f"{TINY}:RMSNorm"}, mode="inference|torch_compile") as report, torch.no_grad():
        on = torch.compile(model, backend="eager")(ids).logits
    torch._dynamo.reset()
    torch.testing.assert_close(on, model(ids).logits)
    report.assert_replaced("RMSNorm", executed=False)
    with pytest.raises(KernelReportError, match=r"\[kernels-uncounted\]"):
        report.assert_replaced("RMSNorm")


# Attention ------------------------------------------------------------------------------------------------------


def test_attention_runs_on_the_kernel_and_is_counted(engine: Any, model: Any, ids: Any) -> None:
    import torch

    engine.override("org/attn", KERNELS / "demo-attn")
    with torch.no_grad():
        eager = model(ids).logits
        with engine.attention(model, "org/attn") as report:
            kernel = model(ids).logits
    torch.testing.assert_close(kernel, eager)
    report.assert_replaced("attention")
    assert report.rows[0].calls == 2
    assert model.config._attn_implementation == "eager"


def test_flash_attention_2_without_its_package_names_the_kernel(engine: Any, model: Any, ids: Any) -> None:
    from importlib.util import find_spec

    if find_spec("flash_attn") is not None:
        pytest.skip("flash-attn is installed")
    import torch

    engine.override("kernels-community/flash-attn2", KERNELS / "demo-attn")
    with engine.watch() as report:
        model.to(torch.bfloat16).set_attn_implementation("flash_attention_2")
        model(ids)
    report.assert_replaced("attention")
    assert report.rows[0].repository == "kernels-community/flash-attn2"


def test_an_attention_kernel_that_was_loaded_before_is_watched_too(engine: Any, model: Any, ids: Any) -> None:
    """transformers does not ask again for what it has loaded."""
    from importlib.util import find_spec

    if find_spec("flash_attn") is not None:
        pytest.skip("flash-attn is installed")
    import torch

    engine.override("kernels-community/flash-attn2", KERNELS / "demo-attn")
    model.to(torch.bfloat16).set_attn_implementation("flash_attention_2")
    model(ids)
    for _ in range(2):
        with engine.watch() as report:
            model(ids)
        report.assert_replaced("attention")
        assert report.rows[0].calls == 2


# Where kernels are ----------------------------------------------------------------------------------------------


def test_variants_of_a_folder_an_override_and_the_cache(
    engine: Any, patched: Callable[..., Path], offline: Path
) -> None:
    wrong = "torch29-cxx11-cpu-x86_64-linux"
    assert engine.variants(TINY) == {"torch-universal": None}
    found = engine.variants(patched(TINY, variant=wrong))
    assert "2.9" in str(found[wrong])
    seed(offline, "org/tiny", TINY)
    assert engine.variants("org/tiny", version=1) == {"torch-universal": None}
    engine.override("org/tiny", patched(TINY, name="again", variant=wrong))
    assert set(engine.variants("org/tiny")) == {wrong}


def test_require_loads_or_skips(engine: Any) -> None:
    with pytest.raises(Refused) as caught:
        engine.require("org/tiny", version=1)
    assert caught.value.codes == ["kernels-offline"]
    engine.override("org/tiny", TINY)
    assert engine.require("org/tiny", version=1).layers.RMSNorm
