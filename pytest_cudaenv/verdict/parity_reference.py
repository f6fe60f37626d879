"""What a candidate is compared with: the same weights, run eagerly, in another precision."""

from __future__ import annotations

import contextlib
import copy
import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_cudaenv.verdict.parity_numbers import Leaf, ParityError, cache_tensors, leaves

EAGER = "eager"


def higher(dtype: Any) -> Any:
    """The precision that a dtype is judged by: float64 for float32, float32 for what is smaller."""
    import torch

    return torch.float64 if dtype in {torch.float32, torch.float64} else torch.float32


def name_of(dtype: Any) -> str:
    """`bfloat16`."""
    return str(dtype).removeprefix("torch.")


def is_module(model: Any) -> bool:
    """Whether it has weights."""
    return hasattr(model, "state_dict") and hasattr(model, "named_parameters")


def configured(config: Any) -> frozenset[str]:
    """The attention backends that a transformers config and its sub-configs name."""
    if config is None:
        return frozenset()
    name = getattr(config, "_attn_implementation", None)
    found = {name} if isinstance(name, str) else set()
    for sub in getattr(config, "sub_configs", None) or {}:
        found |= configured(getattr(config, sub, None))
    return frozenset(found)


def is_quantized(model: Any) -> bool:
    """Whether its weights are no plain floating-point numbers."""
    if getattr(model, "hf_quantizer", None) is not None or getattr(model, "is_quantized", False):
        return True
    return any(p.element_size() == 1 for p in model.parameters())


def dtype_of(model: Any) -> Any:
    """The dtype of most of a model's floating-point weights; None where it has none."""
    sizes: dict[Any, int] = {}
    for p in model.parameters():
        if p.is_floating_point() and p.element_size() > 1:
            sizes[p.dtype] = sizes.get(p.dtype, 0) + p.numel()
    return max(sizes, key=lambda dtype: sizes[dtype]) if sizes else None


def check_dtype(model: Any, dtype: Any) -> None:
    """The weights are in the cell's dtype, but for those that transformers keeps in float32 on purpose."""
    import torch

    keep = {*(getattr(model, "_keep_in_fp32_modules", None) or ())}
    keep |= {*(getattr(model, "_keep_in_fp32_modules_strict", None) or ())}
    wrong = [
        (name, p.dtype)
        for name, p in model.named_parameters()
        if p.is_floating_point()
        and p.element_size() > 1
        and p.dtype != dtype
        and not (p.dtype == torch.float32 and keep & set(name.split(".")))
    ]
    if wrong:
        name, have = wrong[0]
        text = f"the cell is {name_of(dtype)}, {name} is {name_of(have)} ({len(wrong)} parameters so)"
        raise ParityError("parity-dtype", f"{text}; build the model with `cell.build` or load it with `dtype=`")


def twin(model: Any, dtype: Any, low: Any) -> Any:
    """A model with the same weights and mode that runs eagerly in a dtype; `low` is the candidate's own.

    Raises ParityError where there is no way to make one.
    """
    if is_quantized(model):
        text = f"{type(model).__name__} is quantized: its weights have no higher precision"
        raise ParityError("parity-no-reference", f"{text}; pass `reference=` (a model, a callable or a stored file)")
    built = _from_config(model, dtype)
    if built is None:
        built = _copied(model, dtype, low)
    if remaining := configured(getattr(built, "config", None)) - {EAGER}:
        text = f"the reference of {type(model).__name__} would still use {', '.join(sorted(remaining))}"
        raise ParityError("parity-no-reference", f"{text}; pass `reference=`")
    check_weights(model, built)
    return built.train(model.training)


def can_be_eager(model: Any) -> bool:
    """Whether it can be told which attention to run, as transformers' models can."""
    return hasattr(model, "set_attn_implementation") or (
        hasattr(type(model), "_from_config") and getattr(model, "config", None) is not None
    )


def in_dtype(model: Any, dtype: Any) -> Any:
    """A plain module in a dtype: itself, or a copy. Raises ParityError where it cannot be copied."""
    own = dtype_of(model)
    if own is None or own == dtype:
        return model
    try:
        built = copy.deepcopy(model)
    except Exception as error:
        text = f"{type(model).__name__} cannot be copied into {name_of(dtype)} ({error})"
        raise ParityError("parity-no-reference", f"{text}; pass `reference=` a callable that computes in it") from None
    _cast_weights(built, own, dtype)
    return built


def check_precise(reference: Any, dtype: Any) -> None:
    """A reference's weights are no less precise than the cell's: they were rounded, and are other weights."""
    own = dtype_of(reference)
    if own is not None and own.itemsize < dtype.itemsize:
        text = f"the cell is {name_of(dtype)}, the weights of `reference=` are {name_of(own)}"
        raise ParityError("parity-dtype", f"{text}: they are less precise; load both from one state dict")


def dropouts(model: Any) -> list[str]:
    """What may drop elements of a model in train mode: its modules, and the numbers of its config."""
    import torch

    kind = torch.nn.modules.dropout._DropoutNd
    found = [f"{name}: p={m.p:g}" for name, m in model.named_modules() if isinstance(m, kind) and m.training and m.p]
    config: Any = getattr(model, "config", None)
    told = config.to_dict() if hasattr(config, "to_dict") else {}
    found += [f"config.{n}={v:g}" for n, v in told.items() if "drop" in n and isinstance(v, float) and v]
    return found


def uncached(model: Any, inputs: Inputs) -> Inputs:
    """The inputs, with no cache asked for where gradient checkpointing has the candidate go without one.

    In train mode it returns none, whatever was asked; a reference, which has no need of it, would return one.
    """
    if not (getattr(model, "training", False) and getattr(model, "is_gradient_checkpointing", False)):
        return inputs
    parameters = inspect.signature(model.forward).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    config = getattr(model, "config", None)
    has_cache = any(hasattr(part, "use_cache") for part in (config, getattr(config, "text_config", None)))
    if not ("use_cache" in parameters or (takes_any and has_cache)):
        return inputs
    given = inspect.signature(model.forward).bind_partial(*inputs.args).arguments
    return inputs if "use_cache" in given else Inputs(inputs.args, {**inputs.kwargs, "use_cache": False})


def _from_config(model: Any, dtype: Any) -> Any | None:
    """Built anew, so that what is not in the state dict (a rotary embedding's frequencies) is computed, not rounded."""
    make, config = getattr(type(model), "_from_config", None), getattr(model, "config", None)
    if make is None or config is None:
        return None
    config = copy.deepcopy(config)
    plain = {"experts_implementation": EAGER} if getattr(config, "_experts_implementation", None) else {}
    try:
        with seeded(0, model):
            built = make(config, attn_implementation=EAGER, dtype=dtype, **plain)
        with _no_grad():
            for _name, p in built.named_parameters():
                p.requires_grad_(False)
            built.load_state_dict(model.state_dict(), strict=True)
    except (RuntimeError, TypeError, ValueError, ImportError):
        return None  # changed since it was built (adapters), or a class with a constructor of its own
    wanted = {name: p.requires_grad for name, p in model.named_parameters()}
    for name, p in built.named_parameters():
        p.requires_grad_(wanted.get(name, False))
    return built.to(device_of(model))


def _copied(model: Any, dtype: Any, low: Any) -> Any:
    if not hasattr(model, "set_attn_implementation"):
        text = f"{type(model).__name__} cannot be told to run eagerly (no config, no set_attn_implementation)"
        raise ParityError("parity-no-reference", f"{text}; pass `reference=` (a model, a callable or a stored file)")
    built = copy.deepcopy(model)
    built.set_attn_implementation(EAGER)
    if dtype != low:
        _cast_weights(built, low, dtype)
    return built


def _cast_weights(model: Any, own: Any, dtype: Any) -> None:
    """Not `model.to(dtype)`: what is float32 within a half-precision model is so on purpose."""
    for module in model.modules():
        for store in (module._parameters, module._buffers):
            for tensor in store.values():
                if tensor is not None and tensor.is_floating_point() and tensor.dtype == own:
                    tensor.data = tensor.data.to(dtype)


def check_weights(candidate: Any, reference: Any) -> None:
    """Both have the same numbers, in the smaller of their precisions."""
    mine, theirs = candidate.state_dict(), reference.state_dict()
    for name in mine.keys() & theirs.keys():
        a, b = mine[name], theirs[name]
        if not (hasattr(a, "is_floating_point") and a.is_floating_point() and b.is_floating_point()):
            continue
        if a.shape != b.shape:
            raise ParityError("parity-weights", f"{name} is {list(a.shape)}, in the reference {list(b.shape)}")
        smaller = a.dtype if a.element_size() <= b.element_size() else b.dtype
        b = b.to(a.device)
        if not bool((a.to(smaller) == b.to(smaller)).all()) and not bool((a.isnan() == b.isnan()).all()):
            raise ParityError("parity-weights", f"{name} has NaN in one of them")
        if not bool(((a.to(smaller) == b.to(smaller)) | (a.isnan() & b.isnan())).all()):
            off = float((a.double() - b.double()).abs().max())
            text = f"{name} differs between candidate and reference by {off:.3g}: not the same weights"
            raise ParityError("parity-weights", f"{text}; load both from one state dict")
    if not mine.keys() & theirs.keys() and mine and theirs:
        raise ParityError("parity-weights", "candidate and reference have no weight of the same name; pass a callable")


def rounded_buffers(candidate: Any, reference: Any) -> list[str]:
    """Buffers outside the state dict that differ: a likely cause, as those that `model.to(bfloat16)` rounds."""
    saved = candidate.state_dict().keys()
    mine = {name: b for name, b in candidate.named_buffers() if name not in saved and b.is_floating_point()}
    theirs = dict(reference.named_buffers())
    return [
        name
        for name, b in mine.items()
        if name in theirs
        and b.shape == theirs[name].shape
        and not bool((b.double().cpu() - theirs[name].double().cpu()).abs().max() <= 1e-6)
    ]


def device_of(model: Any) -> Any:
    """Where its first weight is; None for a model without one."""
    return next((p.device for p in model.parameters()), None) if is_module(model) else None


@contextlib.contextmanager
def seeded(seed: int, model: Any = None) -> Iterator[None]:
    """A block that starts from a seed and gives the generators back as they were."""
    import torch

    device = device_of(model)
    devices = [device.index or 0] if device is not None and device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield


def in_double(dtype: Any, *, is_code: bool = False) -> contextlib.AbstractContextManager[Any]:
    """A block in which models that ask for float32 on the way get float64, where the run is in float64.

    transformers' eager attention has its softmax in float32 whatever the model's dtype is. What masks add in float64
    is infinite there: rows that see nothing become NaN, and NaN times a weight of zero is NaN for all that follow.
    Norms and rotary embeddings ask for float32 too, and would make the reference no better than the candidate.
    Of a function of the test's own (`is_code`) the casts are meant: of it only softmax is changed.
    """
    import torch

    if dtype != torch.float64:
        return contextlib.nullcontext()
    from torch.overrides import TorchFunctionMode

    class InDouble(TorchFunctionMode):  # type: ignore[misc,unused-ignore]
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = dict(kwargs or {})
            name = getattr(func, "__name__", "")
            if is_code and (
                name not in {"softmax", "log_softmax"} or getattr(args[0] if args else None, "dtype", None) != dtype
            ):
                return func(*args, **kwargs)
            if name == "float":
                return args[0].double()
            if name in {"softmax", "log_softmax", "to", "type", "sum", "mean", "cumsum"}:
                args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
                if kwargs.get("dtype") is torch.float32:
                    kwargs["dtype"] = torch.float64
            return func(*args, **kwargs)

    return InDouble()


def _no_grad() -> Any:
    import torch

    return torch.no_grad()


def fresh(value: Any, dtype: Any = None) -> Any:
    """A copy that shares no memory with the original; floating-point tensors in a dtype."""
    if hasattr(value, "is_floating_point") and hasattr(value, "detach"):
        return _cast(value.detach().clone(), dtype).requires_grad_(value.requires_grad)
    if isinstance(value, Mapping):
        return {name: fresh(inner, dtype) for name, inner in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(fresh(inner, dtype) for inner in value))
    if isinstance(value, (tuple, list)):
        return type(value)(fresh(inner, dtype) for inner in value)
    copied = copy.deepcopy(value)
    if cache_tensors(copied) is not None:
        for layer in _layers(copied):
            for name in ("keys", "values"):
                if hasattr(tensor := getattr(layer, name, None), "is_floating_point"):
                    setattr(layer, name, _cast(tensor, dtype))
            if getattr(layer, "dtype", None) is not None and dtype is not None:
                layer.dtype = dtype
    return copied


def _layers(cache: Any) -> Iterator[Any]:
    for part in (cache, getattr(cache, "self_attention_cache", None), getattr(cache, "cross_attention_cache", None)):
        yield from getattr(part, "layers", None) or ()


def _cast(tensor: Any, dtype: Any) -> Any:
    import torch

    if dtype is None or not tensor.is_floating_point() or tensor.dtype == dtype:
        return tensor
    ends = torch.finfo(dtype)
    if ends.max >= torch.finfo(tensor.dtype).max:
        return tensor.to(dtype)
    # The smallest float32 is what masks add; in bfloat16 it would be minus infinity, and rows of NaN.
    return torch.where(tensor.isfinite(), tensor.clamp(ends.min, ends.max), tensor).to(dtype)


@dataclass(frozen=True)
class Inputs:
    """What a model is called with."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def fresh(self, dtype: Any, first: Any = None) -> Inputs:
        """The same for one more call: rounded to `first`, then in `dtype`, in memory of its own."""
        args, kwargs = self.args, dict(self.kwargs)
        for step in (first, dtype):
            args, kwargs = fresh(args, step), fresh(kwargs, step)
        return Inputs(args, kwargs)

    def numbered(self) -> dict[str, Any]:
        """By their places, which two modules may name differently."""
        return {str(place): value for place, value in enumerate(self.args)} | dict(self.kwargs)

    def named(self, model: Any) -> dict[str, Any]:
        """By the names that the model gives them."""
        function = model.forward if is_module(model) else model
        try:
            bound = inspect.signature(function).bind_partial(*self.args, **self.kwargs)
        except (TypeError, ValueError):  # built in, and without a signature
            return {f"argument {number}": value for number, value in enumerate(self.args)} | dict(self.kwargs)
        named: dict[str, Any] = {}
        for name, value in bound.arguments.items():
            parameter = inspect.signature(function).parameters[name]
            if parameter.kind is parameter.VAR_KEYWORD:
                named |= value
            elif parameter.kind is not parameter.VAR_POSITIONAL:
                named[name] = value
        return named


def batch_of(named: Mapping[str, Any]) -> int | None:
    """The size of the batch: of the first input that has one."""
    for name in ("input_ids", "decoder_input_ids", "inputs_embeds", "pixel_values", "input_features", "attention_mask"):
        tensor: Any = named.get(name)
        if hasattr(tensor, "shape") and len(tensor.shape):
            return int(tensor.shape[0])
    return next((int(t.shape[0]) for t in named.values() if hasattr(t, "shape") and len(t.shape)), None)


def mask_of(named: Mapping[str, Any]) -> Any | None:
    """The mask of the positions that the outputs have; None where there is none of one number per position."""
    is_decoded = any(named.get(n) is not None for n in ("decoder_input_ids", "decoder_inputs_embeds"))
    mask: Any = named.get("decoder_attention_mask" if is_decoded else "attention_mask")
    return mask if hasattr(mask, "dim") and mask.dim() == 2 else None


IGNORED = -100
"""The label that torch's losses leave out."""


def without_hidden_labels(inputs: Inputs, named: Mapping[str, Any], mask: Any | None) -> Inputs:
    """The inputs with the labels left out that are predicted at, or are, positions which the mask hides.

    Backends compute something else there, each its own, and a loss adds it up. A causal model predicts the first
    visible token of a row that is padded on the left at a hidden position.
    """
    labels: Any = named.get("labels")
    if mask is None or "labels" not in inputs.kwargs or not hasattr(labels, "masked_fill"):
        return inputs
    if labels.is_floating_point() or tuple(labels.shape) != tuple(mask.shape):
        return inputs
    hidden = (mask == 0).to(labels.device)
    hidden[:, 1:] |= hidden[:, :-1].clone()
    return Inputs(inputs.args, {**inputs.kwargs, "labels": labels.masked_fill(hidden, IGNORED)})


@dataclass(frozen=True)
class Run:
    """What one call gave."""

    outputs: dict[str, Leaf]
    gradients: dict[str, Leaf]
    missing: frozenset[str] = frozenset()
    """Parameters that want a gradient and got none."""
    steps: dict[str, Any] | None = None
    """Tokens and logits of a generation."""


def call(
    model: Any,
    inputs: Inputs,
    dtype: Any,
    *,
    cell_dtype: Any,
    seed: int,
    backward: bool = False,
    generate: int = 0,
    compare: Callable[[Any], Any] | None = None,
    mask: Any | None = None,
    run: Callable[[Any, Inputs], Any] | None = None,
) -> Run:
    """Run a model once, in `dtype`, on inputs rounded to the cell's first: every side gets the same numbers.

    `run`: a caller's own way to call the model, on inputs in the dtypes that they have. Gradients are then those of
    the first output, which may be a loss; all are missing where it has no gradient function.
    """
    import torch

    mine = inputs.fresh(dtype, cell_dtype) if run is None else inputs.fresh(None)
    embedded: list[Any] = []
    hook = _watch_embeddings(model, embedded) if backward and run is None else None
    with seeded(seed, model), torch.set_grad_enabled(backward), in_double(dtype, is_code=not is_module(model)):
        try:
            output = model(*mine.args, **mine.kwargs) if run is None else run(model, mine)
        finally:
            if hook is not None:
                hook.remove()
        picked = leaves(output if compare is None else compare(output))
        gradients: dict[str, Leaf] = {}
        missing: list[str] = []
        if backward:
            named = mine.named(model) if run is None else mine.numbered()
            wanted = _wanted(model, named, embedded)
            goal = _goal(picked, wanted, is_strict=run is None)
            missing = list(wanted)
            if goal is not None:
                gradients, missing = _gradients(goal, wanted, cell_dtype, seed, mask)
    steps = None
    if generate:
        steps = _generate(model, inputs.fresh(dtype, cell_dtype), generate, seed, dtype)
    return Run(picked, gradients, frozenset(missing), steps)


def _watch_embeddings(model: Any, embedded: list[Any]) -> Any:
    if not hasattr(model, "get_input_embeddings"):
        return None
    try:
        module = model.get_input_embeddings()
    except NotImplementedError:
        return None
    if module is None:
        return None

    def remember(_module: Any, _args: Any, output: Any) -> None:
        if hasattr(output, "requires_grad") and output.requires_grad:
            embedded.append(output)

    return module.register_forward_hook(remember)


def _wanted(model: Any, named: Mapping[str, Any], embedded: Sequence[Any]) -> dict[str, Any]:
    """What gradients are taken of, by the names that they get: parameters, inputs, and the input embeddings."""
    wanted: dict[str, Any] = {}
    if is_module(model):
        wanted |= {f"grad {name}": p for name, p in model.named_parameters() if p.requires_grad}
    wanted |= {f"grad of input {n}": t for n, t in named.items() if getattr(t, "requires_grad", False)}
    if embedded:
        wanted["grad of the input embeddings"] = embedded[0]
    return wanted


def _goal(outputs: Mapping[str, Leaf], wanted: Mapping[str, Any], *, is_strict: bool) -> Any | None:
    """The output whose gradients are taken: the first, which in a strict run has more than one number; None: no such.

    Raises ParityError for that in a strict run.
    """
    least = 2 if is_strict else 0
    path, leaf = next(((p, x) for p, x in outputs.items() if x.tensor.numel() >= least), (None, None))
    if wanted and leaf is not None and leaf.tensor.requires_grad:
        return leaf.tensor
    if not is_strict:
        return None
    if not wanted:
        raise ParityError("parity-no-gradient", "backward=True, and neither a parameter nor an input wants a gradient")
    raise ParityError("parity-no-gradient", f"backward=True, and {path or 'no output'} has no gradient function")


def _gradients(
    output: Any, wanted: Mapping[str, Any], cell_dtype: Any, seed: int, mask: Any | None
) -> tuple[dict[str, Leaf], list[str]]:
    """Gradients of a projection of an output to one number, without touching the model's own `.grad`; a loss is one."""
    import torch

    goal = output
    if output.dim():
        generator = torch.Generator().manual_seed(seed)
        weights = torch.randn(output.shape, generator=generator, dtype=torch.float64)
        weights = (weights / max(1, output.shape[0])).to(cell_dtype).to(output.device, output.dtype)
        if mask is not None and output.dim() > 2 and tuple(output.shape[:2]) == tuple(mask.shape):
            weights = weights * mask.to(output.device, output.dtype)[..., None]
        goal = (output * weights).sum()
    found = torch.autograd.grad(goal, list(wanted.values()), allow_unused=True)
    gradients = {name: Leaf(g) for name, g in zip(wanted, found, strict=True) if g is not None}
    return gradients, [name for name, g in zip(wanted, found, strict=True) if g is None]


def _generate(model: Any, inputs: Inputs, count: int, seed: int, inputs_dtype: Any) -> dict[str, Any]:
    """`count` greedy tokens: (batch, count) tokens, and (batch, count, vocabulary) logits before any processor."""
    import torch

    with seeded(seed, model), torch.no_grad(), in_double(inputs_dtype):
        made = model.generate(
            *inputs.args,
            **inputs.kwargs,
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            num_beams=1,
            output_logits=True,
            return_dict_in_generate=True,
        )
    logits = torch.stack(tuple(made.logits), dim=1)
    return {"tokens": made.sequences[:, -logits.shape[1] :].cpu(), "logits": logits}


def agreeing(mine: Any, reference: Any) -> Any:
    """Steps whose logits may be compared, (batch, steps): those up to, and with, each row's first differing token."""
    equal = (mine == reference).long()
    before = equal.cumprod(dim=1)
    shifted = before.roll(1, dims=1)
    shifted[:, 0] = 1
    return shifted.bool()


def stored(path: str | os.PathLike[str]) -> dict[str, Leaf]:
    """Outputs saved before: a `.pt` file of tensors, nested as a model's output, or a `.safetensors` file by path."""
    where = Path(path)
    if not where.is_file():
        raise ParityError("parity-no-reference", f"reference {where} is not there")
    if where.suffix == ".safetensors":
        from safetensors.torch import load_file

        return {name: Leaf(tensor) for name, tensor in load_file(str(where)).items()}
    import torch

    return leaves(torch.load(where, map_location="cpu", weights_only=True))


def digest(value: Any) -> int:
    """A number that other content does not have, 64 bits: of tensors on any device, nested, and of plain values."""
    if hasattr(value, "is_floating_point") and hasattr(value, "detach"):
        return hash((tuple(value.shape), str(value.dtype), str(value.device), value.requires_grad, _content(value)))
    if isinstance(value, Mapping):
        return hash(tuple((str(name), digest(inner)) for name, inner in value.items()))
    if isinstance(value, (tuple, list)):
        return hash(tuple(digest(inner) for inner in value))
    if (cached := cache_tensors(value)) is not None:
        return hash(tuple((name, digest(tensor)) for name, tensor in cached))
    return hash(repr(value))


def _content(tensor: Any) -> int:
    import torch

    flat = tensor.detach().reshape(-1)
    if not flat.numel():
        return 0
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()]
    numbers = (flat.to(torch.uint8) if flat.dtype == torch.bool else flat.view(whole)).long()
    places = torch.arange(numbers.numel(), device=numbers.device, dtype=torch.int64) * 0x9E3779B1 + 1
    # Wraps around, which is what is wanted; each place has a weight of its own, so that a permutation is other content.
    return int((numbers * places).sum())
