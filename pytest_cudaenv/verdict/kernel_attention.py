"""Attention kernels of the Hub: which one transformers loaded, and how often its functions were called."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pytest_cudaenv.verdict.kernel_report import Replacement

ATTENTION = "attention"
"""The layer name of an attention kernel in reports."""


class AttentionKernels:
    """Counts the calls of attention kernels that transformers loads while it is entered."""

    def __init__(self, hub_kernels: Any, function: str = "") -> None:
        self.hub = hub_kernels
        self.function = function
        """A function of the kernel that transformers was asked for by name."""
        self.kernels: list[AttentionKernel] = []
        self.original = hub_kernels.get_kernel

    def __enter__(self) -> AttentionKernels:
        def get_kernel(name: str, *args: Any, **kwargs: Any) -> Any:
            module = self.original(name, *args, **kwargs)
            if not any(kernel.module is module for kernel in self.kernels):
                self.kernels.append(AttentionKernel(name, kwargs, module, self.function))
            return module

        self.hub.get_kernel = get_kernel
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def rows(self) -> Iterator[Replacement]:
        for kernel in self.kernels:
            if kernel.used:
                yield kernel.row()

    def end(self) -> None:
        self.hub.get_kernel = self.original
        for kernel in self.kernels:
            kernel.end()


class AttentionKernel:
    """One attention kernel, whose functions count their calls."""

    FUNCTIONS = ("flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache")

    def __init__(self, repo: str, at: dict[str, Any], module: Any, function: str) -> None:
        self.repo, self.module, self.calls = repo, module, 0
        self.revision = at.get("revision") or (f"v{at['version']}" if at.get("version") is not None else None)
        names = [*self.FUNCTIONS, function] if function else self.FUNCTIONS
        self.used = {name: getattr(module, name) for name in names if hasattr(module, name)}
        for name, original in self.used.items():
            setattr(module, name, self._counting(original))

    def _counting(self, function: Any) -> Any:
        @functools.wraps(function)
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return function(*args, **kwargs)

        return counted

    def row(self) -> Replacement:
        file = str(self.module.__file__)
        variant = Path(file).parent.name
        return Replacement(
            ATTENTION, ATTENTION, "kernel", self.repo, self.revision, variant, file, None, self.calls, is_function=True
        )

    def end(self) -> None:
        for name, function in self.used.items():
            setattr(self.module, name, function)
