"""The global state of a process that decides torch's numbers: read before a test, compared and set back after it.

Reading and setting back never imports anything, never initialises CUDA and never raises. What cannot be read in the
torch that is here is left alone.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

Values = dict[str, Any]
"""Setting -> its value at one moment."""

Read = Callable[[], Any]
Write = Callable[[Any], object]


@dataclass(frozen=True)
class Setting:
    """One piece of global state, under the name by which a user sets or asks for it."""

    name: str
    read: Read
    write: Write
    is_library_own: bool = False
    """Whether libraries change it in normal use: it is given back, and nobody is blamed."""


@dataclass(frozen=True)
class Leak:
    """A setting that a test has left changed."""

    name: str
    have: str
    was: str


class _Mixed:
    """The value of one of torch's older precision settings while the newer ones contradict it: asking raises."""

    def __repr__(self) -> str:
        return "neither (old and new precision settings are mixed)"


MIXED: Final = _Mixed()

# torch's settings -------------------------------------------------------------------------------------------------

LEGACY = {
    "torch.backends.cuda.matmul.allow_tf32": ("torch.backends.cuda.matmul.fp32_precision",),
    "torch.get_float32_matmul_precision()": (
        "torch.backends.cuda.matmul.fp32_precision",
        "torch.backends.mkldnn.matmul.fp32_precision",
    ),
    "torch.backends.cudnn.allow_tf32": (
        "torch.backends.cudnn.conv.fp32_precision",
        "torch.backends.cudnn.rnn.fp32_precision",
    ),
}
"""Each of torch's older precision settings -> the newer ones (torch 2.9 and later) that it sets as well."""

_PRECISIONS = (
    # Parents first: an operator's own setting is "none" where it follows its backend's, which may follow the general.
    ("torch.backends.fp32_precision", "generic", "all"),
    ("torch.backends.cudnn.fp32_precision", "cuda", "all"),
    ("torch.backends.mkldnn.fp32_precision", "mkldnn", "all"),
    ("torch.backends.cuda.matmul.fp32_precision", "cuda", "matmul"),
    ("torch.backends.cudnn.conv.fp32_precision", "cuda", "conv"),
    ("torch.backends.cudnn.rnn.fp32_precision", "cuda", "rnn"),
    ("torch.backends.mkldnn.matmul.fp32_precision", "mkldnn", "matmul"),
    ("torch.backends.mkldnn.conv.fp32_precision", "mkldnn", "conv"),
    ("torch.backends.mkldnn.rnn.fp32_precision", "mkldnn", "rnn"),
)

_SWITCHES = (
    # torch.backends refuses assignments after `disable_global_flags`; what it calls does not.
    ("torch.backends.cudnn.enabled", "_get_cudnn_enabled", "_set_cudnn_enabled"),
    ("torch.backends.cudnn.benchmark", "_get_cudnn_benchmark", "_set_cudnn_benchmark"),
    (
        "torch.backends.cudnn.benchmark_limit",
        "_cuda_get_cudnn_benchmark_limit",
        "_cuda_set_cudnn_benchmark_limit",
    ),
    ("torch.backends.cudnn.deterministic", "_get_cudnn_deterministic", "_set_cudnn_deterministic"),
    ("torch.backends.mkldnn.enabled", "_get_mkldnn_enabled", "_set_mkldnn_enabled"),
    ("torch.backends.mkldnn.deterministic", "_get_mkldnn_deterministic", "_set_mkldnn_deterministic"),
    (
        "torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction",
        "_get_cublas_allow_fp16_reduced_precision_reduction",
        "_set_cublas_allow_fp16_reduced_precision_reduction",
    ),
    (
        "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction",
        "_get_cublas_allow_bf16_reduced_precision_reduction",
        "_set_cublas_allow_bf16_reduced_precision_reduction",
    ),
    (
        "torch.backends.cuda.matmul.allow_fp16_accumulation",
        "_get_cublas_allow_fp16_accumulation",
        "_set_cublas_allow_fp16_accumulation",
    ),
    (
        "torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()",
        "_get_math_sdp_allow_fp16_bf16_reduction",
        "_set_math_sdp_allow_fp16_bf16_reduction",
    ),
    ("torch.backends.cuda.flash_sdp_enabled()", "_get_flash_sdp_enabled", "_set_sdp_use_flash"),
    ("torch.backends.cuda.mem_efficient_sdp_enabled()", "_get_mem_efficient_sdp_enabled", "_set_sdp_use_mem_efficient"),
    ("torch.backends.cuda.math_sdp_enabled()", "_get_math_sdp_enabled", "_set_sdp_use_math"),
    ("torch.backends.cuda.cudnn_sdp_enabled()", "_get_cudnn_sdp_enabled", "_set_sdp_use_cudnn"),
    (
        "torch.utils.deterministic.fill_uninitialized_memory",
        "_get_deterministic_fill_uninitialized_memory",
        "_set_deterministic_fill_uninitialized_memory",
    ),
)


class _Order(list[int]):
    """Which of sdpa's kernels comes first. Equal to another that is torch's own as well.

    Where cuDNN's attention is the better one torch puts it first when sdpa is first asked on a device, once in a
    process: that is nobody's leak, and to set it back would have other tests run another kernel.
    Source: https://github.com/pytorch/pytorch/blob/v2.11.0/aten/src/ATen/native/transformers/cuda/sdp_utils.cpp
    """

    OWN = ((1, 2, 0, 3, 4), (3, 1, 2, 0, 4))
    """As torch starts, and with cuDNN first (numbers of torch.nn.attention.SDPBackend)."""

    __hash__ = None

    def __eq__(self, other: object) -> bool:
        if isinstance(other, list) and tuple(self) in self.OWN and tuple(other) in self.OWN:
            return True
        return super().__eq__(other)

    def __ne__(self, other: object) -> bool:
        return not self == other


def torch_settings(torch: Any) -> list[Setting]:
    """The settings that this torch has, in the order in which they are set back."""
    found: list[Setting] = []

    def add(name: str, read: Read, write: Write) -> None:
        with contextlib.suppress(Exception):  # another release, or no torch at all: it has no such setting
            read()
            found.append(Setting(name, read, write))

    def default_device() -> str | None:
        # `torch.get_default_device` makes a tensor to learn the index, and so initialises CUDA.
        context = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
        return None if context is None else str(context.device)

    kept: list[Any] = []

    def set_inference(mode: bool) -> None:
        guard = torch.inference_mode(mode=mode)  # there is no setter, and the mode ends with the guard
        guard.__enter__()
        kept[:] = [guard]

    def both(first: Read, second: Read) -> Read:
        return lambda: (first(), second())

    add("torch.get_default_dtype()", torch_read(torch, "get_default_dtype"), torch_call(torch, "set_default_dtype"))
    add("torch.get_default_device()", default_device, torch_call(torch, "set_default_device"))
    add("torch.is_inference_mode_enabled()", torch_read(torch, "is_inference_mode_enabled"), set_inference)
    add("torch.is_grad_enabled()", torch_read(torch, "is_grad_enabled"), torch_call(torch, "set_grad_enabled"))
    for kind in ("cuda", "cpu"):
        for getter, setter in (
            ("is_autocast_enabled", "set_autocast_enabled"),
            ("get_autocast_dtype", "set_autocast_dtype"),
        ):
            add(f"torch.{getter}({kind!r})", torch_read(torch, getter, kind), torch_call(torch, setter, kind))
    add(
        "torch.is_autocast_cache_enabled()",
        torch_read(torch, "is_autocast_cache_enabled"),
        torch_call(torch, "set_autocast_cache_enabled"),
    )
    add("the number of autocast blocks", partial(_autocast_depth, torch), partial(_leave_autocast, torch))
    add(
        "torch.are_deterministic_algorithms_enabled()",
        lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        lambda v: torch.use_deterministic_algorithms(v[0], warn_only=v[1]),
    )
    add(
        "torch.is_anomaly_enabled()",
        both(torch_read(torch, "is_anomaly_enabled"), torch_read(torch, "is_anomaly_check_nan_enabled")),
        lambda v: torch.autograd.set_detect_anomaly(*v),
    )
    add("torch.get_num_threads()", torch_read(torch, "get_num_threads"), torch_call(torch, "set_num_threads"))
    add(
        "torch.is_warn_always_enabled()",
        torch_read(torch, "is_warn_always_enabled"),
        torch_call(torch, "set_warn_always"),
    )
    core = getattr(torch, "_C", None)
    for name, getter, setter in _SWITCHES:
        read, write = getattr(core, getter, None), getattr(core, setter, None)
        if read is not None and write is not None:
            add(name, read, _star(write))
    order, set_order = getattr(core, "_get_sdp_priority_order", None), getattr(core, "_set_sdp_priority_order", None)
    if order is not None and set_order is not None:
        add("the order of sdpa's kernels", lambda: _Order(order()), lambda value: set_order(list(value)))
    return found + _precisions(torch)


def torch_read(torch: Any, name: str, *arguments: str) -> Read:
    """A reader that finds its function anew each time: a suite may have replaced it, and put it back."""
    return partial(_call, torch, name, *arguments)


def torch_call(torch: Any, name: str, *arguments: str) -> Write:
    """The same for what takes a value."""
    return partial(_call, torch, name, *arguments)


def _call(torch: Any, name: str, *arguments: Any) -> Any:
    return getattr(torch, name)(*arguments)


def _star(write: Write) -> Write:
    """torch 2.10 and later reads two values where it read one before, and takes them one by one."""
    return lambda value: write(*value) if isinstance(value, tuple) else write(value)


def _autocast_depth(torch: Any) -> int:
    torch.autocast_increment_nesting()
    return int(torch.autocast_decrement_nesting())


def _leave_autocast(torch: Any, depth: int) -> None:
    """Casts of weights are kept until the outermost block ends: one that never ends would serve stale weights."""
    for _ in range(_autocast_depth(torch) - depth):
        torch.autocast_decrement_nesting()
    torch.clear_autocast_cache()


def _precisions(torch: Any) -> list[Setting]:
    """What float32 products are computed in: first the older settings, which set the newer ones too, then these."""

    def legacy(read: Read) -> Read:
        def ask() -> Any:
            try:
                return read()
            except RuntimeError:  # torch's answer where both kinds were used and disagree
                return MIXED

        return ask

    core = getattr(torch, "_C", None)
    found = [
        Setting(name, legacy(read), write)
        for name, read, write in (
            (
                "torch.get_float32_matmul_precision()",
                torch_read(torch, "get_float32_matmul_precision"),
                torch_call(torch, "set_float32_matmul_precision"),
            ),
            (
                "torch.backends.cuda.matmul.allow_tf32",
                getattr(core, "_get_cublas_allow_tf32", None),
                getattr(core, "_set_cublas_allow_tf32", None),
            ),
            (
                "torch.backends.cudnn.allow_tf32",
                getattr(core, "_get_cudnn_allow_tf32", None),
                getattr(core, "_set_cudnn_allow_tf32", None),
            ),
        )
        if read is not None and write is not None and _answers(legacy(read))
    ]
    ask, tell = getattr(core, "_get_fp32_precision_getter", None), getattr(core, "_set_fp32_precision_setter", None)
    if ask is None or tell is None:
        return found

    def precision(backend: str, operator: str) -> tuple[Read, Write]:
        def write(value: str) -> None:
            tell(backend, operator, "none")  # what it follows may say the same
            if ask(backend, operator) != value:
                tell(backend, operator, value)

        return lambda: ask(backend, operator), write

    return found + [
        Setting(name, *pair)
        for name, backend, operator in _PRECISIONS
        if _answers((pair := precision(backend, operator))[0])
    ]


def _answers(read: Read) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            read()
        except Exception:
            return False
    return True


# transformers' settings -------------------------------------------------------------------------------------------

_REGISTRIES = (
    ("transformers.modeling_utils", "ALL_ATTENTION_FUNCTIONS"),
    ("transformers.masking_utils", "ALL_MASK_ATTENTION_FUNCTIONS"),
)

_FLASH = "transformers.modeling_flash_attention_utils"

_FLASH_GLOBALS = (
    "_loaded_implementation",
    "_flash_fn",
    "_flash_varlen_fn",
    "_flash_with_kvcache_fn",
    "_pad_fn",
    "_unpad_fn",
    "_process_flash_kwargs_fn",
    "_process_with_kvcache_kwargs_fn",
)


def transformers_settings(modules: Mapping[str, Any]) -> list[Setting]:
    """Which function each attention backend is, and which FlashAttention is loaded, where transformers is imported."""
    found: list[Setting] = []
    for module, name in _REGISTRIES:
        registry = getattr(modules.get(module), name, None)
        for scope in ("_global_mapping", "_local_mapping"):
            mapping = getattr(registry, scope, None)
            if isinstance(mapping, dict):
                told = name if scope == "_global_mapping" else f"{name} (of this module)"
                found.append(Setting(told, partial(_without_hub_kernels, mapping), partial(_refill, mapping)))
    if (flash := modules.get(_FLASH)) is not None and hasattr(flash, "_loaded_implementation"):
        found += _flash_settings(flash)
    return found


def _without_hub_kernels(mapping: dict[str, Any]) -> dict[str, Any]:
    """Loading a kernel of the Hub adds it under its repository's name: a cache, on which models built with it rely."""
    return {name: function for name, function in mapping.items() if "/" not in str(name)}


def _refill(mapping: dict[str, Any], was: dict[str, Any]) -> None:
    for name in [n for n in mapping if "/" not in str(n) and n not in was]:
        del mapping[name]
    mapping.update(was)


def _flash_settings(flash: Any) -> list[Setting]:
    """transformers keeps the functions of the implementation that was loaded last, and loads again on each switch.

    A switch is normal use. Functions that changed without one were replaced by hand.
    """

    def read() -> tuple[Any, ...]:
        return tuple(getattr(flash, name, None) for name in _FLASH_GLOBALS)

    def write(value: tuple[Any, ...]) -> None:
        if value[0] is None and getattr(flash, "_loaded_implementation", None) is not None:
            return  # the first one to be loaded: to load a Hub kernel anew for each test would take a look at the Hub
        for name, one in zip(_FLASH_GLOBALS, value, strict=True):
            if hasattr(flash, name):
                setattr(flash, name, one)

    return [Setting(f"{_FLASH}._flash_fn", read, write, is_library_own=True)]


# The process's --------------------------------------------------------------------------------------------------

_NOT_THE_TESTS = (
    "PYTEST_",
    "CUDAENV_",
    "COV_",
    "COVERAGE_",
    # What libraries set for themselves, once, when they are first used.
    "CUDA_MODULE_LOADING",
    "DISABLE_CUPTI_LAZY_REINIT",
    "TEARDOWN_CUPTI",
    "KMP_",
    "TORCHINDUCTOR_",
    "_TORCHINDUCTOR_",
    "TORCH_WARM_POOL",
    "TRITON_",
    "CUBLAS_WORKSPACE_CONFIG",
    "TOKENIZERS_PARALLELISM",
    "NCCL_GRAPH_MIXING_SUPPORT",
)
"""Beginnings of variables that pytest, coverage, this plugin or a library sets while a test runs."""

ENVIRON = "os.environ"


def is_the_tests(name: str) -> bool:
    """Whether a variable that changed while a test ran is the test's to give back."""
    return not name.startswith(_NOT_THE_TESTS)


def _environ() -> dict[Any, Any]:
    # Decoding the variables takes a hundred times as long as copying what they are kept in.
    raw = getattr(os.environ, "_data", None)
    return dict(raw) if isinstance(raw, dict) else dict(os.environ)


def _text(name: Any) -> str:
    return os.fsdecode(name) if isinstance(name, (bytes, str)) else str(name)


def _changed_variables(have: Mapping[Any, Any], was: Mapping[Any, Any]) -> list[Any]:
    return [
        name for name in dict.fromkeys((*was, *have)) if have.get(name) != was.get(name) and is_the_tests(_text(name))
    ]


def _set_environ(was: Mapping[Any, Any]) -> None:
    for name in _changed_variables(_environ(), was):
        if name in was:
            os.environ[_text(name)] = _text(was[name])
        else:
            os.environ.pop(_text(name), None)


# Comparing ------------------------------------------------------------------------------------------------------


class State:
    """The settings of this process, as far as its libraries are imported."""

    def __init__(self, modules: Mapping[str, Any] | None = None) -> None:
        self.modules: Mapping[str, Any] = sys.modules if modules is None else modules
        self._settings: dict[str, Setting] = {}
        self._seen: tuple[int, ...] | None = None

    @property
    def settings(self) -> dict[str, Setting]:
        """By name; found anew once one of the libraries has been imported."""
        get = self.modules.get
        seen = (id(get("torch")), *(id(get(name)) for name in (*(m for m, _ in _REGISTRIES), _FLASH)))
        if seen != self._seen:
            self._seen = seen
            torch = get("torch")
            found = [] if torch is None else torch_settings(torch) + transformers_settings(self.modules)
            self._settings = {setting.name: setting for setting in found}
        return self._settings

    def read(self) -> Values:
        """All values now."""
        values: Values = {}
        for name, setting in self.settings.items():
            with contextlib.suppress(Exception):
                values[name] = setting.read()
        values[ENVIRON] = _environ()
        return values

    def set_back(self, was: Values) -> None:
        """Make all settings what they were, as far as they can be."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(2):  # setting one may change another, where an older name stands for several
                if not self._set_changed(was):
                    break
        with contextlib.suppress(Exception):
            if ENVIRON in was:
                _set_environ(was[ENVIRON])

    def _set_changed(self, was: Values) -> bool:
        changed = False
        for name, setting in self.settings.items():
            with contextlib.suppress(Exception):
                if name in was and was[name] is not MIXED and setting.read() != was[name]:
                    changed = True
                    setting.write(was[name])
        return changed

    def leaks(self, have: Values, was: Values) -> list[Leak]:
        """What differs and is somebody's doing, each thing under one name."""
        changed = [n for n in have if n in was and n != ENVIRON and have[n] != was[n]]
        found: list[Leak] = []
        for name in _without_synonyms(changed, have, was):
            found += self._told(name, have[name], was[name])
        if ENVIRON in was and ENVIRON in have:
            found += [
                _told_variable(n, have[ENVIRON], was[ENVIRON]) for n in _changed_variables(have[ENVIRON], was[ENVIRON])
            ]
        return found

    def _told(self, name: str, have: Any, was: Any) -> list[Leak]:
        setting = self._settings.get(name)
        if setting is not None and setting.is_library_own:
            replaced = have[0] == was[0] and have[1:] != was[1:]
            return [Leak(name, "functions that were replaced by hand", "the loaded ones")] if replaced else []
        if isinstance(was, dict):
            names = [n for n in dict.fromkeys((*was, *have)) if have.get(n) is not was.get(n)]
            return [Leak(f"{name}[{n!r}]", _function(have.get(n)), _function(was.get(n))) for n in names]
        if isinstance(have, tuple) and isinstance(was, tuple) and len(have) == len(was):
            differing = [pair for pair in zip(have, was, strict=True) if pair[0] != pair[1]]
            have, was = tuple(pair[0] for pair in differing), tuple(pair[1] for pair in differing)
        return [Leak(name, _value(have), _value(was))]


def _without_synonyms(changed: list[str], have: Values, was: Values) -> list[str]:
    """The changed settings, without those that only follow one that is named."""
    names = dict.fromkeys(changed)
    for old, new in LEGACY.items():
        if old not in names:
            if old in have and have[old] is not MIXED and have[old] == was.get(old):
                # Who gives it back by the older name leaves "ieee" where "none" was, which is the same.
                for name in new:
                    if {have.get(name), was.get(name)} == {"none", "ieee"}:
                        names.pop(name, None)
            continue
        if MIXED in (have[old], was[old]) and any(n in names for n in new):
            del names[old]  # the newer setting says more
        elif old == "torch.get_float32_matmul_precision()" and "torch.backends.cuda.matmul.allow_tf32" in names:
            # `set_float32_matmul_precision` sets oneDNN's as well, `allow_tf32` does not.
            if new[1] not in names and new[1] in have:
                del names[old]
            else:
                del names["torch.backends.cuda.matmul.allow_tf32"]
    for old, new in LEGACY.items():
        if old in names:
            for name in new:
                names.pop(name, None)
    for parent, children in _FOLLOWERS.items():
        if parent in names:
            for child in children:
                if have.get(child) == have[parent] and was.get(child) == was[parent]:
                    names.pop(child, None)
    return list(names)


_FOLLOWERS = {
    parent: tuple(name for name, b, o in _PRECISIONS if (b, o) != (backend, "all") and (backend in ("generic", b)))
    for parent, backend, operator in _PRECISIONS
    if operator == "all"
}
"""A setting -> those that follow it while they say nothing of their own."""


def _value(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, (tuple, list)) else str(value)


def _function(value: Any) -> str:
    return "none" if value is None else str(getattr(value, "__qualname__", None) or type(value).__name__)


def _told_variable(name: Any, have: Mapping[Any, Any], was: Mapping[Any, Any]) -> Leak:
    """Without the values: a variable may hold a secret, and reports are public."""
    text = f"os.environ[{_text(name)!r}]"
    if name not in was:
        return Leak(text, "it set", "unset")
    return Leak(text, "another value" if name in have else "it unset", "set")


# What is given back, or begun anew, without a word ----------------------------------------------------------------


class Generators:
    """The states of the random number generators of the CPU: those of Python, NumPy and torch."""

    def __init__(self) -> None:
        self.states: Values = {"random": random.getstate()}
        with contextlib.suppress(Exception):
            if (numpy := sys.modules.get("numpy")) is not None:
                self.states["numpy"] = numpy.random.get_state()
        with contextlib.suppress(Exception):
            if (torch := sys.modules.get("torch")) is not None:
                self.states["torch"] = torch.get_rng_state()

    def set_back(self) -> None:
        """Make them what they were."""
        with contextlib.suppress(Exception):
            random.setstate(self.states["random"])
        with contextlib.suppress(Exception):
            if "numpy" in self.states:
                sys.modules["numpy"].random.set_state(self.states["numpy"])
        with contextlib.suppress(Exception):
            if "torch" in self.states:
                sys.modules["torch"].set_rng_state(self.states["torch"])


_ANSWERS = (
    "is_torch_cuda_available",
    "is_torch_bf16_gpu_available",
    "is_torch_bf16_available_on_device",
    "is_torch_fp16_available_on_device",
    "is_torch_tf32_available",
    "is_cuda_platform",
    "is_rocm_platform",
    "is_flash_attn_2_available",
    "is_flash_attn_3_available",
    "is_flash_attn_4_available",
    "is_torch_flex_attn_available",
)
"""What transformers asks of devices once and remembers; each takes less than a millisecond to ask again."""


class Answers:
    """Counts what transformers remembers of devices, to make it forget what it learned while a test ran.

    The test may have replaced `torch.cuda.is_available`, or hidden the devices.
    """

    def __init__(self) -> None:
        self.known = {name: function.cache_info().misses for name, function in _remembering().items()}

    def forget_new(self) -> None:
        """Make it forget what it has learned since."""
        for name, function in _remembering().items():
            with contextlib.suppress(Exception):
                if function.cache_info().misses != self.known.get(name, 0):
                    function.cache_clear()


def _remembering() -> dict[str, Any]:
    module = sys.modules.get("transformers.utils.import_utils")
    found = {name: getattr(module, name, None) for name in _ANSWERS} if module is not None else {}
    return {name: function for name, function in found.items() if hasattr(function, "cache_info")}


def let_warn_again() -> None:
    """Have transformers and accelerate warn again of what they warn of once in a process."""
    adapter = getattr(sys.modules.get("accelerate.logging"), "MultiProcessAdapter", None)
    for owner, name in ((logging.Logger, "warning_once"), (logging.Logger, "info_once"), (adapter, "warning_once")):
        forget = getattr(getattr(owner, name, None), "cache_clear", None)
        if forget is not None:
            with contextlib.suppress(Exception):
                forget()


# The guard ------------------------------------------------------------------------------------------------------


class Guard:
    """Gives each test the state that the suite itself has set, and takes it back.

    What fixtures of a wider scope set up or tear down, and what modules do while they are collected, is the suite's.
    """

    def __init__(self, state: State | None = None) -> None:
        self.state = state or State()
        self.known: Values | None = None
        """As the suite has set it; None while torch is not imported."""
        self._start: Values | None = None
        """Of the running test."""
        self._left: Values = {}
        """What tests that are not watched had left, in front of the running one."""
        self._before: list[Values | None] = []
        """At the beginning of each block, innermost last, that is the suite's doing."""
        self._generators: Generators | None = None
        self._answers: Answers | None = None

    @property
    def _has_torch(self) -> bool:
        return self.state.modules.get("torch") is not None

    def look(self) -> None:
        """Before the first test."""
        if self.known is None and self._has_torch:
            self.known = self.state.read()

    def before(self) -> None:
        """A test is next: what others left is put aside."""
        self._left = {}
        if not self._has_torch:
            return
        now = self.state.read()
        if self.known is None:
            self.known = now
            return
        left = {n: v for n, v in now.items() if n != ENVIRON and n in self.known and v != self.known[n]}
        if left:
            self._left = left
            # Whole, as setting one may change others. The environment is not put aside.
            self.state.set_back({**now, **{n: self.known[n] for n in left}})
        for name in now.keys() - self.known.keys():  # of a library that was not there before
            self.known[name] = now[name]

    def begin(self) -> None:
        """The test's fixtures are next."""
        self._generators, self._answers = Generators(), Answers()
        let_warn_again()
        self._start = self.state.read()
        if self.known is not None:  # what hooks have done in front of this test they would have done without us
            self._take(self.known, self._start, self.known)

    def imported(self) -> None:
        """torch has just been imported, and is as it comes."""
        now = self.state.read()
        self.known = dict(now)
        if self._start is not None:
            self._start = {**now, ENVIRON: self._start[ENVIRON]}

    def wider_begins(self) -> None:
        """What follows is the suite's doing."""
        self._before.append(self.state.read() if self._has_torch or self._start is not None else None)

    def wider_ends(self) -> None:
        """The end of that."""
        before = self._before.pop() if self._before else None
        if before is None and not self._has_torch:
            return
        now = self.state.read()
        for target in (self.known, self._start):
            if target is not None:
                self._take(before or {}, now, target)

    def _take(self, before: Values, now: Values, target: Values) -> None:
        """Note in `target` what has changed between two moments."""
        changed = {n: v for n, v in now.items() if n != ENVIRON and (n not in before or before[n] != v)}
        target.update(changed)
        for name in changed:
            self._left.pop(name, None)
        here, there = now[ENVIRON], before.get(ENVIRON, {})
        if here != there:
            variables = dict(target.get(ENVIRON, {}))
            for name in dict.fromkeys((*here, *there)):
                if name not in here:
                    variables.pop(name, None)
                elif here[name] != there.get(name):
                    variables[name] = here[name]
            target[ENVIRON] = variables

    def end(self) -> list[Leak]:
        """The test is over: set back what it left, and say what that was."""
        start, self._start = self._start, None
        if start is None:
            return []
        have = self.state.read()
        leaks = self.state.leaks(have, start)
        if have != start:
            self.state.set_back(start)
        if self._left:
            self.state.set_back({**start, **self._left})
        if self._generators is not None:
            self._generators.set_back()
        if self._answers is not None:
            self._answers.forget_new()
        self._generators = self._answers = None
        return leaks


CODE = "state-leak"

REMEDY = "Set it in a fixture that gives it back, or with monkeypatch or torch's context managers; it was set back."


def leak_text(leaks: Iterable[Leak]) -> str:
    """Need and have of what a test left changed, on one line."""
    told = list(leaks)
    if len(told) == 1:
        return f"needs {told[0].name} given back; have {told[0].have}, was {told[0].was}"
    shown = ", ".join(f"{leak.name} (have {leak.have}, was {leak.was})" for leak in told[:6])
    return f"needs {len(told)} settings given back; have changed {shown}" + (" …" if len(told) > 6 else "")
