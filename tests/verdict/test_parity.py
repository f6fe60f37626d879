"""Lies that `assert_parity` has to catch, each by its own code, and honest cells that it has to let pass."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from pytest_cudaenv.verdict import parity, parity_reference  # noqa: E402
from pytest_cudaenv.verdict.parity import AssertParity  # noqa: E402
from pytest_cudaenv.verdict.parity_numbers import ParityError  # noqa: E402
from tests.verdict.parity_models import Tiny, cell, four_layers, models, registered, sdpa  # noqa: E402

MODELS = models()
LLAMA = MODELS["llama"]

ATTENTION = Callable[..., Any]


def refused(backend: Any, dtype: Any, model: Any, **call: Any) -> ParityError:
    """How a comparison in this cell is refused."""
    with pytest.raises(ParityError) as caught:
        AssertParity(cell(backend, dtype))(model, **call)
    return caught.value


def caught(attention: ATTENTION, tiny: Tiny = LLAMA, dtype: Any = torch.float32, **call: Any) -> ParityError:
    """How a model with such a backend is refused."""
    inputs = call.pop("inputs", None) or tiny.inputs()
    with registered("lying", attention):
        return refused("lying", dtype, tiny.build("lying", dtype), **inputs, **call)


@pytest.fixture(params=["seeing", "blind"])
def witness(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A witness that sees nothing may not change a verdict about numbers."""
    if request.param == "blind":
        _install_witness(monkeypatch, frozenset())
    return str(request.param)


def _install_witness(monkeypatch: pytest.MonkeyPatch, backends: frozenset[str]) -> None:
    @contextmanager
    def watch(model: Any = None) -> Iterator[Any]:
        yield SimpleNamespace(backends=backends, calls=(), silent=list)

    monkeypatch.setattr(parity, "watch", watch)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("tiny", MODELS.values(), ids=MODELS)
def test_honest_cells_pass(tiny: Tiny, backend: str, dtype: Any, witness: str) -> None:
    model = tiny.build(backend, dtype)
    generate = 0 if tiny.has_image else 3
    found = AssertParity(cell(backend, dtype))(model, **tiny.inputs(), backward=True, generate=generate)
    assert 0 < found.ratio <= 1
    assert found.kind == ("reference" if backend == "eager" else "candidate")
    paths = {row.path for row in found.rows}
    assert "logits" in paths
    assert "grad of the input embeddings" in paths
    assert any(path.startswith("past_key_values.keys") for path in paths)
    assert ("generated logits" in paths) == bool(generate)
    assert not any(p.grad is not None for p in model.parameters())


def test_a_dict_of_backends_is_a_cell() -> None:
    tiny = MODELS["llava"]
    backend = {"text_config": "sdpa", "vision_config": "eager"}
    found = AssertParity(cell(backend, torch.float32))(tiny.build(backend, torch.float32), **tiny.inputs())
    assert found.kind == "candidate"


def _eager(*args: Any, **kwargs: Any) -> Any:
    from transformers.models.llama.modeling_llama import eager_attention_forward

    return eager_attention_forward(*args, **kwargs)


def test_eager_under_another_name_is_told_by_its_bits() -> None:
    with registered("fa9", _eager, masks="eager"):
        model = LLAMA.build("fa9", torch.bfloat16)
        error = refused("fa9", torch.bfloat16, model, **LLAMA.inputs())
    assert error.code == "parity-same-backend"
    assert "bit for bit" in str(error)


def test_a_layer_on_another_backend_is_told_by_the_witness() -> None:
    """Its numbers are right: only who looks at each layer can tell."""
    model = LLAMA.build("sdpa", torch.float32)
    layer = model.model.layers[1].self_attn
    layer.config = copy.deepcopy(layer.config)
    layer.config._attn_implementation = "eager"
    error = refused("sdpa", torch.float32, model, input_ids=LLAMA.inputs()["input_ids"])
    assert error.code == "parity-other-backend"
    assert "eager in model.layers.1.self_attn" in str(error)


def test_eager_under_another_name_is_told_by_the_witness(monkeypatch: pytest.MonkeyPatch) -> None:
    _install_witness(monkeypatch, frozenset({"eager"}))
    error = refused("sdpa", torch.float32, LLAMA.build("sdpa", torch.float32), **LLAMA.inputs())
    assert error.code == "parity-same-backend"
    _install_witness(monkeypatch, frozenset({"sdpa"}))
    found = AssertParity(cell("sdpa", torch.float32))(LLAMA.build("sdpa", torch.float32), **LLAMA.inputs())
    assert not found.notes


def test_a_backend_against_itself() -> None:
    with registered("fake_fa", sdpa):
        model, same = LLAMA.build("fake_fa", torch.bfloat16), LLAMA.build("fake_fa", torch.float32)
        error = refused("fake_fa", torch.bfloat16, model, **LLAMA.inputs(), reference=same)
    assert error.code == "parity-same-backend"
    assert "both use fake_fa" in str(error)


def test_a_config_that_says_eager_in_another_cell() -> None:
    error = refused("sdpa", torch.float32, LLAMA.build("eager", torch.float32), **LLAMA.inputs())
    assert error.code == "parity-same-backend"


def test_an_empty_slice() -> None:
    model = LLAMA.build("sdpa", torch.float32)
    error = refused("sdpa", torch.float32, model, **LLAMA.inputs(), compare=lambda out: out.logits[1:][:0])
    assert error.code == "parity-empty"


def _spoil(row: int, factor: float = 1.05, layer: int | None = None) -> ATTENTION:
    def attention(module: Any, *args: Any, **kwargs: Any) -> Any:
        output, weights = sdpa(module, *args, **kwargs)
        if layer is None or module.layer_idx == layer:
            output = output.clone()
            output[row] *= factor
        return output, weights

    return attention


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_wrong_padded_row_among_seven(dtype: Any) -> None:
    error = caught(_spoil(-1, 1.2), dtype=dtype)
    assert error.code == "parity"
    assert ", row 6," in str(error)


def test_one_wrong_row_of_a_hundred() -> None:
    error = caught(_spoil(57, 1.01), inputs=LLAMA.inputs(batch=100))
    assert error.code == "parity"
    assert ", row 57," in str(error)


def test_one_of_four_layers_is_different() -> None:
    def attention(module: Any, *args: Any, scaling: float, **kwargs: Any) -> Any:
        return sdpa(module, *args, scaling=scaling * (1.001 if module.layer_idx == 2 else 1), **kwargs)

    tiny = four_layers()
    error = caught(attention, tiny)
    assert error.code == "parity"
    checked = AssertParity(cell("lying", torch.float32))
    with registered("lying", attention), pytest.raises(ParityError):
        checked(tiny.build("lying", torch.float32), **tiny.inputs())
    wrong = {row.path for row in checked.found[0].rows if row.ratio > 1}
    # The layer after it is the first that reads what it wrote.
    assert "past_key_values.keys[3]" in wrong
    assert "past_key_values.keys[2]" not in wrong


def test_a_dropped_sliding_window() -> None:
    def attention(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
        kwargs.pop("sliding_window", None)
        return sdpa(module, query, key, value, None, **kwargs)

    tiny = MODELS["window"]
    assert caught(attention, tiny, inputs=tiny.inputs(padding=0)).code == "parity"
    # Shorter than the window there is nothing to drop, and nothing to complain of.
    with registered("lying", attention):
        short = tiny.inputs(length=4, padding=0)
        AssertParity(cell("lying", torch.float32))(tiny.build("lying", torch.float32), **short)


def test_a_kernel_that_detaches_gradients() -> None:
    def attention(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
        return sdpa(module, query.detach(), key, value, mask, **kwargs)

    error = caught(attention, backward=True)
    assert error.code == "parity-no-gradient"
    assert "q_proj.weight gets no gradient" in str(error)


def test_a_wrong_gradient() -> None:
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            return gradient * 1.01

    def attention(module: Any, query: Any, *args: Any, **kwargs: Any) -> Any:
        return sdpa(module, Wrong.apply(query), *args, **kwargs)

    error = caught(attention, backward=True)
    assert error.code == "parity"
    assert "at grad " in str(error)


def test_weights_in_another_precision() -> None:
    error = refused("sdpa", torch.bfloat16, LLAMA.build("sdpa", torch.float32), **LLAMA.inputs())
    assert error.code == "parity-dtype"
    assert "the cell is bfloat16" in str(error)


def test_nan_on_both_sides() -> None:
    model = LLAMA.build("sdpa", torch.float32)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] = float("nan")
    error = refused("sdpa", torch.float32, model, **LLAMA.inputs())
    assert error.code == "parity-nonfinite"
    assert "candidate and reference and low reference" in str(error)


def test_a_constant_output() -> None:
    model = LLAMA.build("sdpa", torch.float32)
    torch.nn.init.zeros_(model.lm_head.weight)
    assert refused("sdpa", torch.float32, model, **LLAMA.inputs()).code == "parity-constant"


def test_all_of_a_row_masked() -> None:
    inputs = LLAMA.inputs(padding=12)
    error = refused("sdpa", torch.float32, LLAMA.build("sdpa", torch.float32), **inputs)
    assert error.code == "parity-all-masked"


def test_other_weights_in_the_reference() -> None:
    other = LLAMA.build("eager", torch.float64, seed=1)
    error = refused("sdpa", torch.float32, LLAMA.build("sdpa", torch.float32), **LLAMA.inputs(), reference=other)
    assert error.code == "parity-weights"


def test_the_same_memory_on_both_sides() -> None:
    kept: list[Any] = []

    def attention(x: Any) -> Any:
        kept.append(torch.softmax(x, -1))
        return kept[0]

    with pytest.raises(ParityError) as found:
        AssertParity()(attention, torch.rand(3, 4), reference=lambda x: kept[0])
    assert found.value.code == "parity-same-storage"


def test_a_model_elsewhere_than_its_cell() -> None:
    on_device = SimpleNamespace(attn_backend="sdpa", dtype=torch.float32, device=torch.device("cuda"))
    with pytest.raises(ParityError) as found:
        AssertParity(on_device)(LLAMA.build("sdpa", torch.float32), **LLAMA.inputs())
    assert found.value.code == "parity-device"


def test_an_eager_cell_that_is_wrong_or_not_repeatable() -> None:
    model = LLAMA.build("eager", torch.float32)
    checked = AssertParity(cell("eager", torch.float32))
    checked(model, **LLAMA.inputs())
    model.model.layers[0].mlp.register_forward_hook(lambda *a: a[-1] + torch.rand(()) * 1e-8)
    checked(model, **LLAMA.inputs())  # seeded, so that both runs draw the same, and within what rounding may do
    drawn = iter(range(9))
    model.model.layers[0].mlp.register_forward_hook(lambda *a: a[-1] * (1 + 1e-5 * next(drawn)))
    with pytest.raises(ParityError) as found:
        checked(model, **LLAMA.inputs())
    assert found.value.code == "parity-unrepeatable"


def test_a_plain_module_needs_a_reference() -> None:
    layer = torch.nn.Linear(4, 4)
    with pytest.raises(ParityError, match="pass `reference=`") as found:
        AssertParity()(layer, torch.rand(2, 4))
    assert found.value.code == "parity-no-reference"


class Attend(torch.nn.Module):
    """A plain module whose attention is a function; grouped neither by a config nor by transformers."""

    def __init__(self, attend: ATTENTION, dtype: Any = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv = torch.nn.Linear(16, 48)
        self.attend = attend
        self.to(dtype)

    def forward(self, x: Any) -> Any:
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.attend(q, k, v)


def by_hand(q: Any, k: Any, v: Any) -> Any:
    return torch.softmax(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5, -1) @ v


def detached(q: Any, k: Any, v: Any) -> Any:
    return fused_attention(q, k, v.detach())


def fused_attention(q: Any, k: Any, v: Any, **more: Any) -> Any:
    return torch.nn.functional.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], **more)[:, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("own", [torch.float64, torch.float32, None], ids=["fp64", "fp32", "same"])
def test_a_plain_module_is_compared_with_another_in_both_precisions(dtype: Any, own: Any) -> None:
    x = torch.randn(3, 8, 16)
    checked = AssertParity(cell("sdpa", dtype))
    fused, plain = Attend(fused_attention, dtype), Attend(by_hand, dtype).to(own or dtype)
    found = checked(fused, x, reference=plain, backward=True)
    assert found.ratio <= 1
    assert not found.notes
    assert any(row.path.startswith("grad") for row in found.rows)
    assert {p.dtype for p in plain.parameters()} == {own or dtype}
    with pytest.raises(ParityError) as wrong:
        checked(Attend(lambda q, k, v: fused_attention(q, k, v, is_causal=True), dtype), x, reference=plain)
    assert wrong.value.code == "parity"
    with pytest.raises(ParityError) as wrong:
        checked(Attend(detached, dtype), x, reference=plain, backward=True)
    assert wrong.value.code == "parity"  # a third of one bias, and of one weight


def test_a_plain_module_beside_a_callable() -> None:
    x = torch.randn(3, 8, 16)
    fused = Attend(fused_attention)

    def reference(x: Any) -> Any:
        weight, bias = fused.qkv.weight.to(x.dtype), fused.qkv.bias.to(x.dtype)
        return by_hand(*torch.nn.functional.linear(x, weight, bias).chunk(3, -1))

    assert AssertParity(cell("sdpa", torch.float32))(fused, x, reference=reference).ratio <= 1
    with pytest.raises(ParityError, match="a callable has none: pass `reference=` a module") as found:
        AssertParity(cell("sdpa", torch.float32))(fused, x, reference=reference, backward=True)
    assert found.value.code == "parity-no-reference"
    inputs = torch.randn(3, 8, 16, requires_grad=True)
    both = AssertParity(cell("sdpa", torch.float32))(fused.forward, inputs, reference=reference, backward=True)
    assert {row.path for row in both.rows} == {"output", "grad of input x"}


def test_a_reference_that_is_less_precise_is_none() -> None:
    plain = Attend(by_hand, torch.bfloat16)
    error = refused("sdpa", torch.float32, Attend(fused_attention), x=torch.randn(3, 8, 16), reference=plain)
    assert error.code == "parity-dtype"
    assert "less precise" in str(error)


@pytest.mark.skipif(not hasattr(BaseException, "add_note"), reason="exceptions take no notes before Python 3.11")
def test_a_callable_that_computes_in_one_dtype_is_told_of_both() -> None:
    copied = copy.deepcopy(Attend(fused_attention))
    with pytest.raises(RuntimeError) as failed:
        AssertParity()(Attend(fused_attention), torch.randn(3, 8, 16), reference=copied.forward)
    assert "called with inputs in float64 and float32 (here float64)" in failed.value.__notes__[0]


@pytest.mark.parametrize("attend", [by_hand, fused_attention])
@pytest.mark.parametrize("kind", ["callable", "module", "itself"])
@pytest.mark.parametrize("table", [{}, {"tolerance": "float32"}], ids=["rule", "table"])
def test_a_plain_module_against_a_copy_of_itself(attend: ATTENTION, kind: str, table: dict[str, Any]) -> None:
    candidate, x = Attend(attend), torch.randn(3, 8, 16)
    copied = copy.deepcopy(candidate)
    given = {"callable": lambda x: copied(x.float()), "module": copied, "itself": candidate}[kind]
    if attend is by_hand and kind == "module" and table:
        return  # run in float64 alone, a copy rounds otherwise, and nobody knows by hand
    error = refused("sdpa", torch.float32, candidate, x=x, reference=given, **table)
    assert error.code == "parity-same-backend"
    if kind == "itself":
        return
    assert ("both run sdpa" if attend is fused_attention else "bit for bit") in str(error)
    found = AssertParity()(candidate, x, reference=given, **table)
    assert (parity.UNPROVEN in found.notes) == (attend is by_hand)
    assert (parity.SAME_BITS in found.notes) == (kind == "callable" or not table)


def test_what_a_plain_module_does_not_prove_is_noted() -> None:
    x = torch.randn(3, 8, 16)
    other = Attend(lambda q, k, v: (torch.softmax(q @ k.mT / 4, -1) @ v) * 1.0000001)
    found = AssertParity(cell("sdpa", torch.float32))(other, x, reference=Attend(by_hand))
    assert found.notes == (parity.UNPROVEN,)


def test_a_layer_that_calls_nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its numbers are right, and the other layers run the cell's backend."""
    model = LLAMA.build("sdpa", torch.float32)
    layer = model.model.layers[1].self_attn

    class ByHand(type(layer)):  # type: ignore[misc]
        def forward(self, hidden_states: Any, position_embeddings: Any, attention_mask: Any = None, **_: Any) -> Any:
            from transformers.models.llama.modeling_llama import apply_rotary_pos_emb, eager_attention_forward

            shape = (*hidden_states.shape[:-1], -1, self.head_dim)
            q, k, v = (p(hidden_states).view(shape).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
            q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
            causal = torch.full((q.shape[2], q.shape[2]), -1e30).triu(1)[None, None]
            out, weights = eager_attention_forward(self, q, k, v, causal, self.scaling)
            return self.o_proj(out.reshape(*hidden_states.shape[:-1], -1)), weights

    layer.__class__ = ByHand
    monkeypatch.setattr("pytest_cudaenv.verdict.witness.compiled_frames", lambda: 0)
    error = refused("sdpa", torch.float32, model, input_ids=LLAMA.inputs()["input_ids"], use_cache=False)
    assert error.code == "parity-other-backend"
    assert "nothing known in model.layers.1.self_attn" in str(error)
    monkeypatch.setattr("pytest_cudaenv.verdict.witness.compiled_frames", lambda: 1)
    inputs = {"input_ids": LLAMA.inputs()["input_ids"], "use_cache": False}
    found = AssertParity(cell("sdpa", torch.float32))(model, **inputs)
    assert found.notes[0].startswith("nothing known in model.layers.1.self_attn: torch.compile has compiled")


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("more", [{}, {"use_cache": True}], ids=["", "cache"])
def test_gradient_checkpointing(backend: str, more: dict[str, Any]) -> None:
    """A checkpointed model in train mode returns no cache: no side is asked for one."""
    model = LLAMA.build(backend, torch.float32)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    found = AssertParity(cell(backend, torch.float32))(model.train(), **LLAMA.inputs(), backward=True, **more)
    assert found.ratio <= 1
    assert any(row.path.startswith("grad") for row in found.rows)
    assert not any("key" in row.path.partition("[")[0] for row in found.rows if not row.path.startswith("grad"))
    found = AssertParity(cell(backend, torch.float32))(model.eval(), **LLAMA.inputs())
    assert any("past_key_values" in row.path for row in found.rows)


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_dropout_in_train_mode(backend: str) -> None:
    dropping = Tiny("dropping", LLAMA.model_class, copy.deepcopy(LLAMA.config))
    dropping.config.attention_dropout = 0.1
    model = dropping.build(backend, torch.float32)
    error = refused(backend, torch.float32, model.train(), **LLAMA.inputs())
    assert error.code == "parity-random"
    assert "(config.attention_dropout=0.1)" in str(error)
    assert AssertParity(cell(backend, torch.float32))(model.eval(), **LLAMA.inputs()).ratio <= 1
    trained = LLAMA.build(backend, torch.float32).train()
    assert AssertParity(cell(backend, torch.float32))(trained, **LLAMA.inputs(), backward=True).ratio <= 1


def test_a_table_has_a_dash_where_there_is_no_number() -> None:
    model = LLAMA.build("eager", torch.float32)
    model.lm_head.register_forward_hook(lambda _m, _a, out: out * 1.5 if out.dtype == torch.float32 else out)
    error = str(refused("eager", torch.float32, model, **LLAMA.inputs()))
    assert "nan" not in error
    assert error.splitlines()[2].split()[3] == "-"


def test_functions_are_compared_with_a_callable() -> None:
    """The reference runs in the higher precision and, as low reference, in that of the inputs."""
    query, key, value = torch.randn(3, 2, 4, 8, 16).bfloat16().unbind(0)

    def plain(q: Any, k: Any, v: Any) -> Any:
        return torch.softmax(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5, -1) @ v

    checked = AssertParity()
    fused = torch.nn.functional.scaled_dot_product_attention
    assert checked(fused, query, key, value, reference=plain).ratio <= 1
    with pytest.raises(ParityError):
        checked(lambda q, k, v: fused(q, k, v, is_causal=True), query, key, value, reference=plain)


def test_a_stored_reference(tmp_path: Path) -> None:
    high = LLAMA.build("eager", torch.float64)
    with torch.no_grad():
        logits = high(**LLAMA.inputs(padding=0)).logits
    torch.save({"logits": logits}, tmp_path / "reference.pt")
    model = LLAMA.build("sdpa", torch.float32)
    checked = AssertParity(cell("sdpa", torch.float32))
    pick = {"compare": lambda out: {"logits": out.logits}, "reference": tmp_path / "reference.pt"}
    assert checked(model, **LLAMA.inputs(padding=0), **pick).ratio <= 1
    # Else the low reference would be as far off as the candidate, which would be right whatever it is.
    with pytest.raises(ParityError, match="other weights, other inputs") as found:
        checked(model, **LLAMA.inputs(seed=1, padding=0), **pick)
    assert found.value.code == "parity-reference"
    inputs = LLAMA.inputs(padding=0)
    inputs["input_ids"][3] = inputs["input_ids"][2]
    with pytest.raises(ParityError, match="in row 3"):
        checked(model, **inputs, **pick)
    with pytest.raises(ParityError, match="is not there"):
        checked(model, **LLAMA.inputs(), reference=tmp_path / "missing.pt")


def test_a_table_where_it_is_asked_for() -> None:
    model = LLAMA.build("sdpa", torch.bfloat16)
    checked = AssertParity(cell("sdpa", torch.bfloat16))
    assert checked(model, **LLAMA.inputs(), tolerance=(0.1, 1.0)).ratio <= 1
    with pytest.raises(ParityError, match=r"allowed .* x \|reference\|"):
        checked(model, **LLAMA.inputs(), tolerance="float32")


def test_references_are_made_once_and_follow_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    twin = parity_reference.twin
    monkeypatch.setattr(parity_reference, "twin", lambda *a: made.append(a[1]) or twin(*a))
    checked = AssertParity(cell("sdpa", torch.float32))
    model = LLAMA.build("sdpa", torch.float32)
    checked(model, **LLAMA.inputs())
    checked(model, **LLAMA.inputs())
    checked(LLAMA.build("sdpa", torch.float32), **LLAMA.inputs())
    assert made == [torch.float64, torch.float32]
    with torch.no_grad():
        model.lm_head.weight.mul_(1.5)
    checked(model, **LLAMA.inputs())
    checked(model, **LLAMA.inputs(seed=1))
    assert len(made) == 6
    checked.clear()
    checked(model, **LLAMA.inputs(seed=1))
    assert len(made) == 8


def test_a_model_that_changes_its_inputs_changes_nobody_elses() -> None:
    class Changing(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            result = x.softmax(-1)
            x.mul_(2)
            return result

    x = torch.rand(3, 4)
    before = x.clone()
    AssertParity()(Changing(), x, reference=lambda x: torch.softmax(x, -1))
    assert torch.equal(x, before)


def test_an_option_that_the_model_takes_too_is_refused() -> None:
    class Takes(torch.nn.Module):
        def forward(self, x: Any, k: Any = None) -> Any:
            return x

    with pytest.raises(TypeError, match="k is an option of assert_parity and an input of Takes"):
        AssertParity()(Takes(), torch.rand(2), k=torch.rand(2))
    with pytest.raises(TypeError, match="tolerance is one of"):
        AssertParity()(LLAMA.build("sdpa", torch.float32), tolerance="float3", **LLAMA.inputs())


def test_what_a_failure_and_a_pass_tell() -> None:
    checked = AssertParity(cell("sdpa", torch.float32))
    model = LLAMA.build("sdpa", torch.float32)
    assert checked.summary() is None
    passed = checked(model, **LLAMA.inputs())
    told = checked.summary()
    assert told is not None
    assert told["ratio"] == passed.ratio
    assert told["checked"] == passed.checked > 7 * 99
    error = str(caught(_spoil(2)))
    first, header, *table = error.splitlines()
    assert first.startswith("[parity] lying-fp32: error ")
    for word in ("allowed", "reference error", "floor", "ratio", "row 2"):
        assert word in first
    assert header.split() == ["output", "row", "error", "reference", "floor", "allowed", "ratio"]
    assert 1 <= len(table) <= 9


def test_buffers_that_were_rounded_are_named() -> None:
    model = LLAMA.build("sdpa", torch.bfloat16)
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq * 1.5
    error = str(refused("sdpa", torch.bfloat16, model, **LLAMA.inputs()))
    assert "note: buffer model.rotary_emb.inv_freq is not what the config gives" in error


@pytest.mark.parametrize(
    ("slip", "meant"),
    [
        ("backwards", "backward"),
        ("tolerence", "tolerance"),
        ("refernce", "reference"),
        ("atention_mask", "attention_mask"),
    ],
)
def test_a_slip_is_no_input(slip: str, meant: str) -> None:
    """transformers' models take any keyword, and say nothing."""
    with pytest.raises(TypeError, match=f"did you mean {meant}"):
        AssertParity(cell("sdpa", torch.float32))(LLAMA.build("sdpa", torch.float32), **LLAMA.inputs(), **{slip: True})


@pytest.mark.parametrize("padding", ["left", "right"])
@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_labels_of_hidden_positions_are_not_counted(backend: str, padding: str) -> None:
    """As suites give them: `labels=input_ids`, padding included. There each backend computes something of its own."""
    tiny = models()["gqa"]
    inputs = tiny.inputs()
    if padding == "right":
        inputs["attention_mask"] = inputs["attention_mask"].flip(1)
    inputs["labels"] = inputs["input_ids"].clone()
    given = inputs["labels"].clone()
    found = AssertParity(cell(backend, torch.float32))(tiny.build(backend, torch.float32), **inputs, backward=True)
    assert "loss" in {row.path for row in found.rows}
    assert torch.equal(inputs["labels"], given), "the test's own labels are as they were"
