"""Replacing the layers of models one by one, without any fallback, so that of each it is known what became of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NoReturn, TypeAlias

from pytest_cudaenv.verdict import kernel_rows
from pytest_cudaenv.verdict.kernel_errors import Diagnosis, HubKernelError, diagnose
from pytest_cudaenv.verdict.kernel_mapping import mode_text
from pytest_cudaenv.verdict.kernel_report import Replacement
from pytest_cudaenv.verdict.kernel_rows import Place, places
from pytest_cudaenv.verdict.kernel_state import UNSET, KernelState, put_back

Refused: TypeAlias = "tuple[Diagnosis, Place, BaseException]"


class Tracker:
    """Replaces the layers of models one by one, and knows of each what became of it."""

    def __init__(
        self,
        state: KernelState,
        refuse: Callable[[Sequence[Refused]], NoReturn],
        *,
        allow: Collection[str],
        wanted: Collection[str] | None,
    ) -> None:
        self.state = state
        self.refuse = refuse
        """Ends the test for what kept layers from their kernels."""
        self.allow = {allow} if isinstance(allow, str) else set(allow)
        self.wanted = wanted
        """Layer names that have to be replaced; None: every one."""
        self.found: dict[int, Place] = {}
        self.reasons: dict[int, str] = {}
        self.modes: dict[int, str] = {}
        self.calls: Counter[int] = Counter()
        self.hooks: list[Any] = []
        self.counted = True
        self.history: list[str] = []

    def add(self, model: Any) -> list[Place]:
        found = list(places(model))
        for place in found:
            if id(place.module) not in self.found:
                self.found[id(place.module)] = place
                self.state.keep_forward(place.module)
        return found

    def replace(self, model: Any, mode: Any, device: Any) -> None:
        """Give every place of a model its kernel for a mode; all or nothing. Raises what kept one from it."""
        self.add(model)
        self._check_any(model)
        before = {key: place.module.__dict__.get("forward", UNSET) for key, place in self.found.items()}
        self.history.append(mode_text(mode))
        refused: list[Refused] = []
        for place in places(model):
            self.calls.pop(id(place.module), None)
            self.reasons.pop(id(place.module), None)
            self.modes[id(place.module)] = mode_text(mode)
            try:
                _replace_one(place.module, mode, device)
            except Exception as error:
                # An earlier kernel must not survive a refusal.
                place.module.__dict__.pop("forward", None)
                diagnosis = diagnose(error)
                self.reasons[id(place.module)] = str(diagnosis)
                if self._is_wanted(place.layer_name):
                    refused.append((diagnosis, place, error))
        if refused:
            for key, forward in before.items():
                put_back(self.found[key].module, "forward", forward)
            self.refuse(refused)
        if mode_text(mode).endswith("TORCH_COMPILE"):
            self.counted = False  # a hook would be compiled with the layer, and counts nothing
        else:
            self._count()

    def _is_wanted(self, layer_name: str) -> bool:
        return layer_name not in self.allow and (self.wanted is None or layer_name in self.wanted)

    def _check_any(self, model: Any) -> None:
        names = {place.layer_name for place in places(model)}
        if not names:
            text = f"{type(model).__name__} has nothing that a kernel can replace"
            remedy = "transformers marks layers while it is imported, with a usable `kernels` and USE_HUB_KERNELS"
            raise HubKernelError("kernels-none", f"{text}: {remedy}")
        for name in self.wanted or ():
            if name not in names and name not in self.allow:
                text = f"no {name} in {type(model).__name__} that a kernel can replace"
                raise HubKernelError("kernels-layer", f"{text}; have {', '.join(sorted(names))}")

    def _count(self) -> None:
        hooked = {id(module) for module, _ in self.hooks}
        for key, place in self.found.items():
            if key not in hooked:

                def hook(*_: object, key: int = key) -> None:
                    self.calls[key] += 1

                self.hooks.append((place.module, place.module.register_forward_hook(hook)))

    def rows(self) -> Iterator[Replacement]:
        for key, place in self.found.items():
            yield kernel_rows.row(
                place,
                layer=self.state.layers.get(place.module),
                origin=self.state.repositories.get(place.module),
                mode=self.modes.get(key),
                calls=self.calls[key],
                reason=self.reasons.get(key),
            )

    def end(self) -> None:
        for _, hook in self.hooks:
            hook.remove()
        self.hooks.clear()


def _replace_one(module: Any, mode: Any, device: Any) -> None:
    """`kernels.kernelize` of one module without those below it, and without any fallback: the exception is the reason.

    https://github.com/huggingface/kernels/blob/main/kernels/src/kernels/layer/layer.py (kernelize_layer)
    """
    from kernels.layer.globals import _KERNEL_MAPPING
    from kernels.layer.layer import KernelizeFallback, kernelize_layer

    name = str(type(module).kernel_layer_name)
    if name not in _KERNEL_MAPPING.get():
        raise ValueError(f"No layer mapping for `{name}`")  # as kernels says it, without a warning for each layer
    condition = getattr(type(module), "kernel_condition", None)
    if condition is not None and not condition(module):
        raise ValueError(f"kernel_condition is False for this {type(module).__name__}")
    kernelize_layer(module, mode=mode, device_type=device, use_fallback=KernelizeFallback.NONE)
