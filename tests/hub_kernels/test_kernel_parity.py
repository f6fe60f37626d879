"""What a comparison of kernels looks at: outputs of every kind, whole numbers to the bit, gradients of a loss."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from pytest_cudaenv.verdict import kernel_parity as parity  # noqa: E402
from pytest_cudaenv.verdict.kernel_errors import HubKernelError, KernelFaultError  # noqa: E402


class Toy(torch.nn.Module):  # type: ignore[misc,unused-ignore]
    """A linear layer whose forward a test may replace."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 3)
        torch.nn.init.uniform_(self.linear.weight, 0.5, 1.5)

    def forward(self, x: Any) -> Any:
        return self.linear(x)


def judged(run: Callable[[Any], Any], kernel: Callable[[Any], Any] | None = None, backward: bool = False) -> Any:
    """The verdict on a Toy whose kernel is `kernel(module)`: what is run in its place."""
    torch.manual_seed(0)
    model = Toy()
    reference, baseline = parity.references(model, run, backward)
    candidate = parity.take(copy.deepcopy(model), kernel or run, backward)
    return parity.judge(candidate, reference, baseline, 2.0)


def x(model: Any) -> Any:
    return torch.arange(8.0, dtype=model.linear.weight.dtype).reshape(2, 4) / 8


def test_whole_numbers_of_a_nested_output_are_found() -> None:
    class Output(dict[str, Any]):
        pass

    ids, mask = torch.arange(3), torch.tensor([True, False])
    found = parity.whole_numbers(Output(loss=torch.zeros(()), ids=ids, more=[torch.ones(2), (mask,)]))
    assert list(found) == ["ids", "more[1][0]"]
    assert found["ids"] is ids
    assert parity.whole_numbers(torch.ones(2)) == {}


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (lambda ids: ids + 1, "has other whole numbers"),
        (lambda ids: ids.int(), r"int32, without \(2,\) torch.int64"),
        (lambda ids: ids[:1], r"with kernels \(1,\)"),
        (lambda ids: ids.double(), "returns other tensors: ids"),
    ],
)
def test_other_whole_numbers_are_a_fault(other: Callable[[Any], Any], text: str) -> None:
    def run(model: Any) -> dict[str, Any]:
        y = model(x(model))
        return {"y": y, "ids": y.argmax(-1)}

    def kernel(model: Any) -> dict[str, Any]:
        found = run(model)
        return found | {"ids": other(found["ids"])}

    assert judged(run)["checked"] == 6 + 2
    with pytest.raises(KernelFaultError, match=text):
        judged(run, kernel)


def test_whole_numbers_alone_can_be_compared() -> None:
    def run(model: Any) -> Any:
        return model(x(model)).argmax(-1)

    assert judged(run) == {"ratio": 0.0, "checked": 2}
    with pytest.raises(KernelFaultError, match="whole numbers"):
        judged(run, lambda model: 1 - run(model).clamp(max=1))


def test_keys_and_values_of_a_cache_are_compared() -> None:
    transformers = pytest.importorskip("transformers")

    def run(model: Any, off: float = 0.0) -> dict[str, Any]:
        y = model(x(model))
        cache = transformers.DynamicCache()
        cache.update(y.reshape(2, 1, 1, 3), y.reshape(2, 1, 1, 3) + off, 0)
        return {"y": y, "cache": cache}

    assert judged(run)["checked"] == 3 * 6
    with pytest.raises(KernelFaultError, match=r"kernels-parity\] cache\.values\[0\]"):
        judged(run, lambda model: run(model, 0.1))


def test_gradients_are_those_of_a_loss_that_comes_first() -> None:
    def run(model: Any, factor: float = 1.0) -> tuple[Any, Any]:
        y = model(x(model))
        return (y**2).sum() * 1.0 + (factor - 1.0) * (y - y.detach()).sum(), y.detach()

    assert judged(run, backward=True)["checked"] == 1 + 6 + 12 + 3
    with pytest.raises(KernelFaultError, match=r"kernels-parity\] grad linear"):
        judged(run, lambda model: run(model, 1.5), backward=True)


def test_a_loss_in_float32_is_held_to_how_the_rest_rounds() -> None:
    """Its own low error is one draw, and may be next to nothing; measured of a float16 Llama."""
    generator = torch.Generator().manual_seed(0)
    y = torch.randn(2, 8, 16, generator=generator)

    def ran(loss: float) -> parity.Run:
        outputs = {"loss": parity.Leaf(torch.tensor(loss)), "logits": parity.Leaf(y.half())}
        return parity.Run(outputs, {}, frozenset(), {})

    exact = {"loss": parity.Leaf(torch.tensor(4.85)), "logits": parity.Leaf(y)}
    reference = parity.Run(exact, {}, frozenset(), {})
    assert parity.judge(ran(4.85 + 1.53e-5), reference, ran(4.85 + 1.91e-6), 2.0)["ratio"] < 1
    with pytest.raises(KernelFaultError, match=r"kernels-parity\] loss"):
        parity.judge(ran(4.9), reference, ran(4.85 + 1.91e-6), 2.0)


def test_a_first_output_without_a_gradient_loses_all() -> None:
    def run(model: Any) -> Any:
        return model(x(model))

    with pytest.raises(KernelFaultError, match=r"kernels-no-gradient\] 2 gradients"):
        judged(run, lambda model: run(model).detach(), backward=True)


def test_a_module_that_names_its_input_otherwise() -> None:
    class Kernel(Toy):
        def forward(self, hidden: Any) -> Any:
            return self.linear(hidden)

    class Detached(Kernel):
        def forward(self, hidden: Any) -> Any:
            return self.linear(hidden.detach())

    torch.manual_seed(0)
    plain = Toy()
    run = parity.applied([torch.randn(2, 4)])
    reference, baseline = parity.references(plain, run, True)
    assert set(baseline.gradients) == {"grad linear.weight", "grad linear.bias", "grad of input 0"}
    for kind, fault in ((Kernel, None), (Detached, "grad of input 0")):
        kernel = kind()
        kernel.load_state_dict(plain.state_dict())
        candidate = parity.take(kernel, run, True)
        if fault is None:
            assert parity.judge(candidate, reference, baseline, 2.0)["ratio"] <= 1
            continue
        with pytest.raises(KernelFaultError, match=fault):
            parity.judge(candidate, reference, baseline, 2.0)


def test_values_that_are_not_finite_in_other_places() -> None:
    def run(model: Any) -> Any:
        return model(x(model))

    with pytest.raises(KernelFaultError, match="1 values are not finite"):
        judged(run, lambda model: run(model).index_put((torch.tensor(0), torch.tensor(1)), torch.tensor(torch.inf)))


def test_nothing_to_compare() -> None:
    for output in ("text", {}, torch.zeros(0)):
        with pytest.raises(HubKernelError, match="kernels-compare"):
            judged(lambda _model, output=output: output)
