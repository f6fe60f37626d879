"""What a comparison is made of: copies, casts, digests, steps that may be compared, twins."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from pytest_cudaenv.verdict import parity_reference as refs  # noqa: E402
from pytest_cudaenv.verdict.parity_numbers import ParityError  # noqa: E402
from tests.verdict.parity_models import models  # noqa: E402

SETTINGS = settings(deadline=None, database=None, max_examples=60)


def test_steps_count_up_to_and_with_the_first_other_token() -> None:
    mine = torch.tensor([[1, 2, 3, 4], [1, 9, 3, 4], [9, 2, 3, 4]])
    theirs = torch.tensor([[1, 2, 3, 4]] * 3)
    assert refs.agreeing(mine, theirs).tolist() == [[True] * 4, [True, True, False, False], [True, False, False, False]]


def test_what_masks_add_stays_finite_in_every_precision() -> None:
    mask = torch.tensor([0.0, torch.finfo(torch.float32).min, float("-inf")])
    half = refs.fresh(mask, torch.float16)
    assert half.tolist() == [0.0, torch.finfo(torch.float16).min, float("-inf")]
    assert refs.fresh(torch.arange(3), torch.float16).dtype == torch.int64


def test_copies_share_no_memory() -> None:
    cache = transformers.DynamicCache()
    cache.update(torch.rand(1, 2, 3, 4), torch.rand(1, 2, 3, 4), 0)
    inputs = refs.Inputs((torch.rand(2),), {"past_key_values": cache, "deep": [{"x": torch.rand(2)}]})
    copied = inputs.fresh(torch.bfloat16)
    assert copied.kwargs["past_key_values"].layers[0].keys.dtype == torch.bfloat16
    assert cache.layers[0].keys.dtype == torch.float32
    copied.args[0].zero_()
    copied.kwargs["deep"][0]["x"].zero_()
    copied.kwargs["past_key_values"].layers[0].keys.zero_()
    assert inputs.args[0].any()
    assert inputs.kwargs["deep"][0]["x"].any()
    assert cache.layers[0].keys.any()


@SETTINGS
@given(
    st.lists(st.integers(-100, 100), min_size=2, max_size=12),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.int8]),
    st.data(),
)
def test_a_digest_tells_contents_apart(values: list[int], dtype: Any, data: st.DataObject) -> None:
    tensor = torch.tensor(values).to(dtype)
    assert refs.digest(tensor) == refs.digest(tensor.clone())
    place = data.draw(st.integers(0, len(values) - 1))
    other = tensor.clone()
    other[place] += 1
    assert refs.digest({"x": tensor}) != refs.digest({"x": other})
    if values != sorted(values):
        assert refs.digest(tensor) != refs.digest(torch.tensor(sorted(values)).to(dtype))
    assert refs.digest(tensor) != refs.digest(tensor.reshape(1, -1))


@pytest.mark.parametrize("name", ["llama", "window", "llava"])
def test_a_twin_is_eager_in_every_part_and_has_exact_buffers(name: str) -> None:
    tiny = models()[name]
    model = tiny.build("sdpa", torch.bfloat16)
    high = refs.twin(model, torch.float32, torch.bfloat16)
    assert refs.configured(high.config) == {"eager"}
    assert refs.configured(model.config) == {"sdpa"}
    assert {p.dtype for p in high.parameters()} == {torch.float32}
    exact = dict(tiny.build("eager", torch.float32).named_buffers())
    for buffer_name, buffer in high.named_buffers():
        assert torch.equal(buffer, exact[buffer_name]), buffer_name


def test_a_model_that_was_changed_is_copied() -> None:
    model = models()["llama"].build("sdpa", torch.bfloat16)
    layer = model.model.layers[0].self_attn
    layer.q_proj = torch.nn.Sequential(layer.q_proj, torch.nn.Linear(32, 32, dtype=torch.bfloat16))
    high = refs.twin(model, torch.float32, torch.bfloat16)
    assert refs.configured(high.config) == {"eager"}
    assert {p.dtype for p in high.parameters()} == {torch.float32}
    assert refs.configured(model.config) == {"sdpa"}
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_a_quantized_model_has_no_twin() -> None:
    model = models()["llama"].build("sdpa", torch.bfloat16)
    model.lm_head.weight = torch.nn.Parameter(torch.zeros(99, 32, dtype=torch.int8), requires_grad=False)
    with pytest.raises(ParityError, match="is quantized") as caught:
        refs.twin(model, torch.float32, torch.bfloat16)
    assert caught.value.code == "parity-no-reference"


def test_weights_that_transformers_keeps_in_float32_are_no_mistake() -> None:
    model = models()["llama"].build("sdpa", torch.bfloat16)
    model.model.norm.float()
    with pytest.raises(ParityError, match=r"norm\.weight is float32"):
        refs.check_dtype(model, torch.bfloat16)
    model._keep_in_fp32_modules = ["norm"]
    refs.check_dtype(model, torch.bfloat16)
