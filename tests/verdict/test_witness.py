"""The witness names what ran, in which module and with what; planted lies are caught, honest models are not."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel

from pytest_cudaenv.requirements.attention import AttnBackend, with_backends
from pytest_cudaenv.verdict.sdpa_choice import reasons
from pytest_cudaenv.verdict.seen import WitnessError
from pytest_cudaenv.verdict.witness import watch
from tests.verdict import tiny_models as tiny
from tests.verdict.parity_models import registered


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("make", tiny.ALL.values(), ids=tiny.ALL)
def test_honest_models_are_what_they_say(make: Callable[[str], Any], backend: str) -> None:
    model = make(backend)
    with watch(model) as seen:
        tiny.run(model)
    seen.assert_ran(backend)
    assert seen.backends == {backend}
    modules = [call.module for call in seen.calls]
    assert len(modules) == len(set(modules)) == (4 if make is tiny.clip else 2)
    assert seen.idle == ()
    with pytest.raises(WitnessError, match=r"\[witness-other\] needs flash_attention_2 .* have " + backend):
        seen.assert_ran("fa2")


def test_flex_runs_under_the_witness_without_being_compiled_by_hand() -> None:
    model = tiny.llama("flex_attention")
    with watch() as seen, torch.no_grad():
        tiny.run(model)
    seen.assert_ran("flex", causal=True)
    assert [call.module for call in seen.calls] == list(tiny.LAYERS)


def test_backward_is_seen() -> None:
    model = tiny.llama("sdpa")
    with watch(model) as seen:
        tiny.run(model, labels=tiny.IDS).loss.backward()
    assert [(call.backend, call.kernel) for call in seen.calls if call.is_backward] == [("sdpa", "flash")] * 2
    seen.assert_ran("sdpa", kernel="flash")


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("kernel", ["flash", "math"])
def test_the_kernel_behind_sdpa_is_told_in_each_grad_mode(kernel: str, mode: Any) -> None:
    choice = {"flash": SDPBackend.FLASH_ATTENTION, "math": SDPBackend.MATH}[kernel]
    with watch() as seen, mode(), sdpa_kernel([choice]):
        tiny.run(tiny.llama("sdpa"))
    assert seen.kernels == {kernel}
    seen.assert_ran("sdpa", kernel=kernel)


def test_sdpa_forced_to_math_is_not_flash_and_the_failure_says_why() -> None:
    model = tiny.llama("sdpa")
    with watch(model) as seen, sdpa_kernel([SDPBackend.MATH]):
        tiny.run(model)
    with pytest.raises(WitnessError) as failure:
        seen.assert_ran("sdpa", kernel="flash")
    assert str(failure.value) == (
        "[witness-kernel] needs sdpa (flash) in each attention module; have sdpa (math) in model.layers.0.self_attn, "
        "model.layers.1.self_attn: flash is switched off (torch.nn.attention.sdpa_kernel or torch.backends.cuda)"
    )
    with pytest.raises(WitnessError, match="needs no math; have"):
        seen.assert_never("math")
    seen.assert_never("flash")


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (lambda q: F.scaled_dot_product_attention(q, q, q, dropout_p=0.5), "takes no dropout, have 0.5"),
        (lambda q: F.scaled_dot_product_attention(q, q, torch.cat([q, q], -1)), "one head size"),
        (lambda q: F.scaled_dot_product_attention(q[0], q[0], q[0]), "4 dimensions, have 3"),
    ],
)
def test_why_the_cpu_ran_math(call: Callable[[Any], Any], why: str) -> None:
    with watch() as seen:
        call(torch.rand(1, 2, 8, 8))
    assert seen.kernels == {"math"}
    with pytest.raises(WitnessError, match=why):
        seen.assert_ran("sdpa", kernel="flash")


def test_one_of_the_layers_on_another_backend_is_named() -> None:
    model = tiny.llama("sdpa")
    tiny.set_backend(model.model.layers[1].self_attn, "eager")
    with watch(model) as seen:
        tiny.run(model)
    with pytest.raises(WitnessError, match=r"needs sdpa in each .*; have eager in model\.layers\.1\.self_attn$"):
        seen.assert_ran("sdpa")
    seen.assert_ran("sdpa", in_="model.layers.0.*")
    seen.assert_ran("eager", in_="model.layers.1.*")


class Handwritten(torch.nn.Module):
    """In the place of an attention module, and attention in no way that is known."""

    def forward(self, hidden_states: Any, **_: Any) -> tuple[Any, None]:
        return hidden_states.softmax(-1), None


def test_a_layer_replaced_by_something_unknown_is_named() -> None:
    model = tiny.llama("sdpa")
    model.model.layers[1].self_attn = Handwritten()
    with watch(model) as seen:
        tiny.run(model)
    with pytest.raises(WitnessError, match=r"have nothing known in model\.layers\.1\.self_attn"):
        seen.assert_ran("sdpa")


def test_another_function_under_the_name_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    from transformers.models.llama.modeling_llama import eager_attention_forward

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", eager_attention_forward)
    with watch() as seen, torch.no_grad():
        tiny.run(tiny.llama("sdpa"))
    with pytest.raises(WitnessError, match=r"have unknown from transformers\.models\.llama\S+eager_attention_forward"):
        seen.assert_ran("sdpa")


def test_an_operator_tells_more_than_the_name_of_the_function(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama import modeling_llama

    def eager(module: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> tuple[Any, None]:
        out, _ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value)
        return out.transpose(1, 2), None

    monkeypatch.setattr(modeling_llama, "eager_attention_forward", eager)
    with watch() as seen, torch.no_grad():
        tiny.run(tiny.llama("eager"))
    with pytest.raises(WitnessError, match=r"needs eager .* have sdpa \(flash\) in model\.layers\.0"):
        seen.assert_ran("eager")


@pytest.mark.parametrize("backend", ["eager", "sdpa", "flash_attention_2"])
def test_a_sliding_window_is_seen_where_it_arrives(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.install_flash(monkeypatch, {"flash_attention_2": tiny.flash_package("flash_attn")})
    model = tiny.flash_llama(backend, tiny.mistral) if "flash" in backend else tiny.mistral(backend)
    with watch(model) as seen:
        tiny.run(model)
    seen.assert_ran(backend, window=4, causal=True)
    with pytest.raises(WitnessError, match=r"\[witness-argument\] needs window=5 .* have window=4 in model\.layers\.0"):
        seen.assert_ran(backend, window=5)


def test_a_window_that_the_package_does_not_take_is_dropped_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.install_flash(
        monkeypatch, {"flash_attention_3": tiny.flash_package("flash_attn_interface", with_window=False)}
    )
    model = tiny.flash_llama("flash_attention_3", tiny.mistral)
    with watch(model) as seen:
        tiny.run(model)
    seen.assert_ran("flash_attention_3")
    with pytest.raises(WitnessError, match="needs window=4 to reach flash_attention_3; have window=None in"):
        seen.assert_ran("flash_attention_3", window=4)


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_a_dropped_window_is_told(backend: str) -> None:
    model = tiny.mistral(backend)
    model.config.sliding_window = None  # the mask is made from this one, in the forward
    with watch(model) as seen:
        tiny.run(model)
    with pytest.raises(WitnessError, match="have window=None"):
        seen.assert_ran(backend, window=4)


def test_a_window_that_no_call_could_show_is_no_proof() -> None:
    model = tiny.mistral("sdpa", window=64)
    with watch(model) as seen:
        tiny.run(model)
    with pytest.raises(WitnessError, match="have at most 12 keys: nothing is checked"):
        seen.assert_ran("sdpa", window=64)


def test_softcap_is_seen_where_the_function_takes_it() -> None:
    with watch() as seen, torch.no_grad():
        tiny.run(tiny.gemma2("eager"))
    seen.assert_ran("eager", softcap=50.0)
    with pytest.raises(WitnessError, match=r"needs softcap=30.0 .* have softcap=50.0"):
        seen.assert_ran("eager", softcap=30.0)
    with watch() as seen, torch.no_grad():
        tiny.run(tiny.llama("eager"))
    with pytest.raises(WitnessError, match="have softcap=None"):
        seen.assert_ran("eager", softcap=50.0)


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_left_padding_does_not_look_like_a_window(backend: str) -> None:
    mask = torch.ones_like(tiny.IDS)
    mask[0, :5] = 0
    for make, window in ((tiny.llama, None), (tiny.mistral, 4)):
        with watch() as seen, torch.no_grad():
            tiny.run(make(backend), attention_mask=mask)
        seen.assert_ran(backend, causal=True)
        assert {call.facts["window"] for call in seen.calls} == {window}


def test_flash_attention_is_told_by_the_function_that_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    """One package under two names: FlashAttention compared with itself."""
    package = tiny.flash_package("flash_attn")
    tiny.install_flash(monkeypatch, {"flash_attention_2": package, "flash_attention_3": package})
    ran = {}
    for backend in ("flash_attention_2", "flash_attention_3"):
        model = tiny.flash_llama(backend)
        with watch(model) as seen:
            tiny.run(model)
        ran[backend] = seen
    ran["flash_attention_2"].assert_ran("flash_attention_2", causal=True)
    with pytest.raises(WitnessError, match=r"needs flash_attention_3 .* have flash_attention_2 in"):
        ran["flash_attention_3"].assert_ran("flash_attention_3")


def test_a_package_called_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    package = tiny.flash_package("flash_attn_interface")
    monkeypatch.setitem(sys.modules, "flash_attn_interface", package)
    q = torch.rand(1, 6, 2, 8)
    with watch() as seen:
        package.flash_attn_func(q, q, q, causal=True, window_size=(3, 0))
    seen.assert_ran("fa3", window=4, causal=True)
    assert not hasattr(package.flash_attn_func, "_cudaenv_original")


def test_sub_configs_with_a_backend_each() -> None:
    model = tiny.clip({"text_config": "eager", "vision_config": "sdpa"})
    with watch(model) as seen:
        tiny.run(model)
    seen.assert_ran("eager", in_="text_model.*")
    seen.assert_ran("sdpa", kernel="flash", in_="vision_model.*")
    with pytest.raises(WitnessError, match="have eager in text_model"):
        seen.assert_ran("sdpa")


def test_what_did_not_run_is_no_failure_but_told() -> None:
    model = tiny.clip("sdpa")
    with watch(model) as seen:
        model.get_text_features(tiny.IDS)
    seen.assert_ran("sdpa")
    assert len(seen.idle) == 2
    with pytest.raises(WitnessError, match=r"\[witness-unseen\].*vision_model\S+ did not run"):
        seen.assert_ran("sdpa", in_="vision_model.*")


def test_another_model_in_the_block_is_not_asked_about() -> None:
    model, reference = tiny.llama("sdpa"), tiny.llama("eager")
    with watch(model) as seen, watch() as both:
        tiny.run(reference)
        tiny.run(model)
    seen.assert_ran("sdpa")
    assert both.backends == {"eager", "sdpa"}


class Plain(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.ModuleDict({"a": Attention(), "b": Attention()})

    def forward(self, x: Any) -> Any:
        return self.inner["b"](self.inner["a"](x))


class Attention(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        return F.scaled_dot_product_attention(x, x, x, is_causal=True)


def test_plain_modules_without_transformers() -> None:
    model = Plain()
    with watch() as seen:
        model(torch.rand(1, 2, 8, 8))
    assert [call.module for call in seen.calls] == ["inner.a", "inner.b"]
    seen.assert_ran("sdpa", kernel="flash", causal=True)


def test_torchs_own_multi_head_attention() -> None:
    model = torch.nn.MultiheadAttention(16, 2, batch_first=True)
    x = torch.rand(2, 6, 16)
    with watch(model) as seen:
        model(x, x, x, need_weights=False)
    seen.assert_ran("sdpa")


def test_the_fast_path_of_torchs_encoder_has_a_name_of_its_own() -> None:
    model = torch.nn.TransformerEncoderLayer(16, 2, 16, batch_first=True).eval()
    with watch() as seen, torch.inference_mode():
        model(torch.rand(2, 6, 16))
    with pytest.raises(WitnessError, match=r"needs sdpa .* have native_mha in TransformerEncoderLayer"):
        seen.assert_ran("sdpa")


def test_autocast() -> None:
    with watch() as seen, torch.autocast("cpu", torch.bfloat16):
        tiny.run(tiny.llama("sdpa"))
    seen.assert_ran("sdpa", kernel="flash")
    assert {call.facts["dtype"] for call in seen.calls} == {"bfloat16"}


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_compiled_code_is_seen_by_its_operators(compiler: str) -> None:
    torch._dynamo.reset()
    model = Plain() if compiler == "aot_eager" else tiny.llama("sdpa")
    inputs = torch.rand(1, 2, 8, 8) if compiler == "aot_eager" else tiny.IDS
    compiled = torch.compile(model, backend=compiler, fullgraph=True)
    for _ in range(2):  # while it is compiled, and once it is
        with watch() as seen, torch.no_grad():
            compiled(inputs)
        assert [(call.backend, call.kernel, call.module) for call in seen.calls] == [("sdpa", "flash", None)] * 2
        seen.assert_ran("sdpa", kernel="flash")
    assert seen.has_compiled
    with watch() as seen, torch.no_grad():
        model(inputs)
    assert None not in {call.module for call in seen.calls}, "the witness must not switch compilation off"


def test_everything_is_put_back() -> None:
    from transformers import modeling_flash_attention_utils as utils
    from transformers.modeling_utils import AttentionInterface

    def places() -> list[Any]:
        return [
            F.scaled_dot_product_attention,
            AttentionInterface.get_interface,
            utils.lazy_import_flash_attention,
            sys.modules["torch.nn.attention.flex_attention"].flex_attention,
        ]

    before = places()
    hooks = torch.nn.modules.module._global_forward_pre_hooks
    with watch(), watch():
        assert all(now is not then for now, then in zip(places(), before, strict=True))
        assert len(hooks) == 2
    assert all(now is then for now, then in zip(places(), before, strict=True))
    assert not hooks
    with pytest.raises(ZeroDivisionError), watch():
        raise ZeroDivisionError
    assert all(now is then for now, then in zip(places(), before, strict=True))


def test_no_result_changes_and_torchscript_still_knows_sdpa() -> None:
    model = tiny.llama("sdpa")
    bare = tiny.run(model).logits
    with watch(model):
        assert torch.equal(tiny.run(model).logits, bare)
        scripted = torch.jit.script(_scripted)
        q = torch.rand(1, 2, 4, 8)
        torch.testing.assert_close(scripted(q), _scripted(q))


def _scripted(q: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, q, q)


def test_a_call_that_raises_has_not_run() -> None:
    with watch() as seen, pytest.raises(RuntimeError):
        F.scaled_dot_product_attention(torch.rand(1, 2, 4, 8), torch.rand(1, 2, 4, 9), torch.rand(1, 2, 4, 9))
    assert seen.calls == ()
    with pytest.raises(WitnessError, match="have no call of attention"):
        seen.assert_ran("sdpa")


@pytest.mark.parametrize(
    ("ask", "slip", "meant"),
    [
        (lambda seen: seen.assert_ran("sdpa", kernel="flahs"), "kernel of sdpa 'flahs'", "flash"),
        (lambda seen: seen.assert_ran("spda"), "attention backend 'spda'", "sdpa"),
        (lambda seen: seen.assert_never("egaer"), "attention backend or kernel of sdpa 'egaer'", "eager"),
        (lambda seen: seen.assert_never("maht"), "attention backend or kernel of sdpa 'maht'", "math"),
        (lambda seen: seen.assert_never("flash_atention_3"), "'flash_atention_3'", "flash_attention_3"),
        (lambda seen: seen.assert_never("my_atention"), "'my_atention'", "my_attention"),
    ],
)
def test_a_name_that_nobody_knows_is_a_slip(ask: Callable[[Any], None], slip: str, meant: str) -> None:
    with registered("my_attention", F.scaled_dot_product_attention), watch() as seen:
        tiny.run(tiny.llama("sdpa"))
    with (
        registered("my_attention", F.scaled_dot_product_attention),
        pytest.raises(ValueError, match=rf"^\[witness-name\] unknown .*{slip}; did you mean '{meant}'\? choose from"),
    ):
        ask(seen)


def test_names_that_somebody_knows_may_never_run() -> None:
    with watch() as seen:
        tiny.run(tiny.llama("sdpa"))
    with_backends({"ring": AttnBackend("ring", entry_points=("rings:attend",))})
    try:
        with registered("my_attention", F.scaled_dot_product_attention):
            for name in (
                "eager",
                "fa3",
                "flex",
                "math",
                "efficient",
                "kernels-community/other",
                "my_attention",
                "ring",
            ):
                seen.assert_never(name)
    finally:
        with_backends({})
    with pytest.raises(ValueError, match="unknown"):
        seen.assert_never("my_attention")
    with pytest.raises(ValueError, match="unknown"):
        seen.assert_never("ring")


def test_of_torchs_warnings_those_about_the_kernel_are_told() -> None:
    """As torch 2.11 warns on an H200 where only flash may run, and may not."""
    lines = [
        "Memory efficient kernel not used because: (Triggered internally at sdp_utils.cpp:908.)",
        "Memory Efficient attention has been runtime disabled. (Triggered internally at sdp_utils_cpp.h:552.)",
        "Flash attention kernel not used because: (Triggered internally at sdp_utils.cpp:910.)",
        "Expected query, key and value to all be of dtype: {Half, BFloat16}. Got Query dtype: float (Triggered inter",
        "CuDNN attention kernel not used because: (Triggered internally at sdp_utils.cpp:912.)",
        "cuDNN attention has been runtime disabled. (Triggered internally at sdp_utils.cpp:571.)",
    ]
    assert reasons(lines, "flash").startswith("Expected query, key and value to all be of dtype: {Half, BFloat16}")
    assert reasons(lines, "cudnn") == "cuDNN attention has been runtime disabled."
    assert reasons([], "efficient") == ""


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_a_backward_pass_that_no_operator_tells_of_is_seen(backend: str) -> None:
    """Eager, and sdpa's math, have none; nor have FlashAttention-4's kernels."""
    model = tiny.llama(backend)
    with watch(model) as seen, sdpa_kernel(SDPBackend.MATH):
        tiny.run(model, labels=tiny.IDS).loss.backward()
    backward = [(call.backend, call.module) for call in seen.calls if call.is_backward]
    assert sorted(backward) == [(backend, layer) for layer in tiny.LAYERS]
    with watch(model) as seen, torch.no_grad():
        tiny.run(model)
    assert not [call for call in seen.calls if call.is_backward]


def test_what_is_only_traced_has_not_run() -> None:
    """Fake tensors and the meta device have no numbers: inductor looks at patterns of attention with the former."""

    def run(q: Any) -> Any:
        torch.ops.aten.scaled_dot_product_attention(q, q, q)
        return F.scaled_dot_product_attention(q, q, q)

    with FakeTensorMode() as fake:
        q = torch.empty(1, 2, 8, 8)
    with watch() as seen, fake:
        run(q)
    assert seen.calls == ()
    with watch() as seen:
        F.scaled_dot_product_attention(*[torch.empty(1, 2, 8, 8, device="meta")] * 3)
    assert seen.calls == ()
    with watch() as seen:
        run(torch.empty(1, 2, 8, 8))
    assert len(seen.calls) == 2
