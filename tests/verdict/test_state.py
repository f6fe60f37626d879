"""The global state that decides torch's numbers: known before each device and cell test, and given back after it."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pytest_cudaenv.verdict.state import ENVIRON, Answers, Guard, State, is_the_tests, leak_text, let_warn_again

torch = pytest.importorskip("torch")
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402

KEPT: list[Any] = []


def enter(manager: Any) -> None:
    KEPT.append(manager)
    manager.__enter__()


LEAKS: dict[str, tuple[Callable[[], object], str]] = {
    "default dtype": (
        lambda: torch.set_default_dtype(torch.float64),
        "get_default_dtype() given back; have torch.float64",
    ),
    "default device": (
        lambda: torch.set_default_device("meta"),
        "get_default_device() given back; have meta, was None",
    ),
    "default device cuda": (lambda: torch.set_default_device("cuda"), "get_default_device() given back; have cuda"),
    "grad mode": (lambda: torch.set_grad_enabled(False), "is_grad_enabled() given back; have False, was True"),
    "inference mode": (lambda: enter(torch.inference_mode()), "is_inference_mode_enabled() (have True, was False)"),
    "autocast": (lambda: enter(torch.autocast("cpu")), "is_autocast_enabled('cpu') (have True, was False)"),
    "autocast dtype": (
        lambda: torch.set_autocast_dtype("cuda", torch.float32),
        "get_autocast_dtype('cuda') given back; have torch.float32",
    ),
    "autocast cache": (lambda: torch.set_autocast_cache_enabled(False), "is_autocast_cache_enabled() given back"),
    "tf32, old": (
        lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", True),
        "needs torch.backends.cuda.matmul.allow_tf32 given back; have True, was False",
    ),
    "tf32, precision": (lambda: torch.set_float32_matmul_precision("high"), "have high, was highest"),
    "tf32, convolutions": (
        lambda: setattr(torch.backends.cudnn, "allow_tf32", False),
        "torch.backends.cudnn.allow_tf32 given back; have False",
    ),
    "reduced bf16": (
        lambda: setattr(torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", False),
        "allow_bf16_reduced_precision_reduction given back; have False, was True",
    ),
    "reduced fp16": (
        lambda: setattr(torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction", False),
        "allow_fp16_reduced_precision_reduction given back; have False, was True",
    ),
    "deterministic": (
        lambda: torch.use_deterministic_algorithms(True),
        "are_deterministic_algorithms_enabled() given back; have True",
    ),
    "fill": (
        lambda: setattr(torch.utils.deterministic, "fill_uninitialized_memory", False),
        "fill_uninitialized_memory given back",
    ),
    "cudnn benchmark": (
        lambda: setattr(torch.backends.cudnn, "benchmark", True),
        "cudnn.benchmark given back; have True",
    ),
    "cudnn deterministic": (lambda: setattr(torch.backends.cudnn, "deterministic", True), "cudnn.deterministic given"),
    "cudnn": (
        lambda: setattr(torch.backends.cudnn, "enabled", False),
        "cudnn.enabled given back; have False, was True",
    ),
    "flash": (
        lambda: torch.backends.cuda.enable_flash_sdp(False),
        "flash_sdp_enabled() given back; have False, was True",
    ),
    "efficient": (
        lambda: torch.backends.cuda.enable_mem_efficient_sdp(False),
        "mem_efficient_sdp_enabled() given back",
    ),
    "math": (lambda: torch.backends.cuda.enable_math_sdp(False), "math_sdp_enabled() given back; have False, was True"),
    "cudnn attention": (
        lambda: torch.backends.cuda.enable_cudnn_sdp(False),
        "cudnn_sdp_enabled() given back; have False",
    ),
    "order of kernels": (
        lambda: enter(sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], set_priority=True)),
        "order of sdpa's kernels",
    ),
    "threads": (lambda: torch.set_num_threads(torch.get_num_threads() + 1), "get_num_threads() given back"),
    "anomaly": (
        lambda: torch.autograd.set_detect_anomaly(True),
        "is_anomaly_enabled() given back; have True, was False",
    ),
    "environment": (
        lambda: os.environ.update(LEFT_BEHIND="1"),
        "os.environ['LEFT_BEHIND'] given back; have it set, was unset",
    ),
}

if hasattr(torch.backends.cuda.matmul, "fp32_precision"):
    LEAKS |= {
        "tf32, new": (
            lambda: setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32"),
            "needs torch.backends.cuda.matmul.fp32_precision given back; have tf32, was none",
        ),
        "tf32, new, convolutions": (
            lambda: setattr(torch.backends.cudnn.conv, "fp32_precision", "ieee"),
            "needs torch.backends.cudnn.conv.fp32_precision given back; have ieee, was tf32",
        ),
        "tf32, new, for all": (
            lambda: setattr(torch.backends, "fp32_precision", "tf32"),
            "needs torch.backends.fp32_precision given back; have tf32, was none",
        ),
    }


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    """What these tests leak on purpose must not depend on the guard that they test."""
    state = State()
    before = state.read()
    yield
    KEPT.clear()
    after = state.read()
    state.set_back(before)
    differing = {name for name in before if after.get(name) != before[name] and name != ENVIRON}
    assert not differing, f"the test was to give back {differing}"


def run(guard: Guard, body: Callable[[], object]) -> str:
    """One test under a guard: what is told of it."""
    guard.before()
    guard.begin()
    body()
    leaks = guard.end()
    return leak_text(leaks) if leaks else ""


def read(guard: Guard) -> dict[str, Any]:
    """All settings but the environment, where libraries that are imported on the way set variables of their own."""
    return {name: value for name, value in guard.state.read().items() if name != ENVIRON}


@pytest.mark.parametrize("kind", LEAKS)
def test_each_kind_of_leak_is_named_and_given_back(kind: str) -> None:
    leak, told = LEAKS[kind]
    guard = Guard()
    before = read(guard)
    guard.look()
    assert told in run(guard, leak)
    assert read(guard) == before
    assert "LEFT_BEHIND" not in os.environ
    assert run(guard, lambda: None) == ""
    assert not torch.cuda.is_initialized()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sampled_from([k for k in LEAKS if k not in {"inference mode", "order of kernels"}]), max_size=6))
def test_any_leaks_together_are_given_back(kinds: list[str]) -> None:
    guard = Guard()
    before = read(guard)
    guard.look()
    told = run(guard, lambda: [LEAKS[kind][0]() for kind in kinds])
    KEPT.clear()
    assert read(guard) == before
    assert bool(told) == bool(kinds)


def test_old_and_new_precision_settings_mixed_by_the_suite_are_left_to_it() -> None:
    """Where the suite's own state makes torch's older getters raise, they are no reason for an error or a leak."""
    if not hasattr(torch.backends.cuda.matmul, "fp32_precision"):
        pytest.skip("this torch has only the older settings")
    guard = Guard()
    torch.backends.cudnn.conv.fp32_precision = "ieee"
    with pytest.raises(RuntimeError):
        _ = torch.backends.cudnn.allow_tf32
    guard.look()
    assert run(guard, lambda: None) == ""
    told = run(guard, lambda: setattr(torch.backends.cudnn, "allow_tf32", False))
    assert "cudnn" in told
    assert torch.backends.cudnn.conv.fp32_precision == "ieee"
    torch.backends.cudnn.allow_tf32 = True


def test_no_value_of_a_variable_is_shown() -> None:
    """Reports are public, and a variable may be a token."""
    guard = Guard()
    guard.look()
    os.environ["HF_TOKEN"] = "hf_before"
    try:
        told = run(guard, lambda: os.environ.update(HF_TOKEN="hf_secret"))
        assert told == "needs os.environ['HF_TOKEN'] given back; have another value, was set"
        assert os.environ["HF_TOKEN"] == "hf_before"
        assert "have it unset, was set" in run(guard, lambda: os.environ.pop("HF_TOKEN"))
        assert os.environ["HF_TOKEN"] == "hf_before"
    finally:
        os.environ.pop("HF_TOKEN", None)


@pytest.mark.parametrize("name", ["PYTEST_CURRENT_TEST", "CUDAENV_TAG", "COV_CORE_SOURCE", "CUDA_MODULE_LOADING"])
def test_variables_of_others_are_no_leak(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "before")
    guard = Guard()
    guard.look()
    assert not is_the_tests(name)
    assert run(guard, lambda: os.environ.update({name: "now"})) == ""
    assert os.environ[name] == "now"


def test_random_numbers_are_given_back_without_a_word() -> None:
    numpy = pytest.importorskip("numpy")

    def draw() -> tuple[float, float, float]:
        return random.random(), float(numpy.random.rand()), float(torch.rand(()))

    guard = Guard()
    states = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    expected = draw()
    random.setstate(states[0])
    numpy.random.set_state(states[1])
    torch.set_rng_state(states[2])
    assert run(guard, draw) == ""
    assert draw() == expected


def test_what_a_wider_fixture_sets_up_and_tears_down_is_no_leak_of_the_test() -> None:
    guard = Guard()
    guard.look()
    guard.before()
    guard.begin()
    guard.wider_begins()
    torch.backends.cudnn.benchmark = True
    os.environ["BY_A_FIXTURE"] = "1"
    guard.wider_ends()
    torch.backends.cudnn.deterministic = True
    assert leak_text(guard.end()) == "needs torch.backends.cudnn.deterministic given back; have True, was False"
    assert torch.backends.cudnn.benchmark
    assert os.environ["BY_A_FIXTURE"] == "1"
    guard.before()
    guard.begin()
    guard.wider_begins()
    torch.backends.cudnn.benchmark = False
    del os.environ["BY_A_FIXTURE"]
    guard.wider_ends()
    assert guard.end() == []
    assert not torch.backends.cudnn.benchmark
    assert "BY_A_FIXTURE" not in os.environ


def test_what_an_unwatched_test_left_is_put_aside_and_given_back() -> None:
    """TF32 left on by the test before, which nobody watches: the next one starts without, the one after is as ever."""
    guard = Guard()
    guard.look()
    torch.backends.cuda.matmul.allow_tf32 = True
    seen = []
    assert run(guard, lambda: seen.append(torch.backends.cuda.matmul.allow_tf32)) == ""
    assert seen == [False]
    assert torch.backends.cuda.matmul.allow_tf32 is True
    torch.backends.cuda.matmul.allow_tf32 = False
    if hasattr(torch.backends.cuda.matmul, "fp32_precision"):
        torch.backends.cuda.matmul.fp32_precision = "none"


def test_what_hooks_set_before_a_test_is_theirs() -> None:
    guard = Guard()
    guard.look()
    guard.before()
    torch.backends.cudnn.benchmark = True  # as a conftest's pytest_runtest_setup does
    guard.begin()
    assert guard.end() == []
    assert torch.backends.cudnn.benchmark is True
    assert run(guard, lambda: None) == ""
    assert torch.backends.cudnn.benchmark is True
    torch.backends.cudnn.benchmark = False


def test_without_torch_nothing_of_it_is_read_and_an_import_starts_from_its_defaults() -> None:
    modules: dict[str, Any] = {}
    guard = Guard(State(modules))
    guard.look()
    guard.before()
    guard.begin()
    assert guard.known is None
    modules["torch"] = torch
    guard.imported()
    torch.backends.cudnn.benchmark = True
    assert leak_text(guard.end()) == "needs torch.backends.cudnn.benchmark given back; have True, was False"
    assert torch.backends.cudnn.benchmark is False


def test_a_torch_that_answers_nothing_is_no_error() -> None:
    guard = Guard(State({"torch": SimpleNamespace(cuda=SimpleNamespace())}))
    guard.look()
    assert run(guard, lambda: None) == ""


@pytest.fixture
def transformers_modules() -> dict[str, Any]:
    """The parts of transformers that are looked at, without the seconds that its import takes."""

    class Registry:
        _global_mapping: dict[str, Any] = {"sdpa": len, "flash_attention_2": max}  # noqa: RUF012

        def __init__(self) -> None:
            self._local_mapping: dict[str, Any] = {}

    class Masks(Registry):
        _global_mapping: dict[str, Any] = {"sdpa": min}  # noqa: RUF012

    flash = SimpleNamespace(_loaded_implementation="flash_attention_2", _flash_fn=len, _flash_varlen_fn=max)
    return {
        "torch": SimpleNamespace(),
        "transformers.modeling_utils": SimpleNamespace(ALL_ATTENTION_FUNCTIONS=Registry()),
        "transformers.masking_utils": SimpleNamespace(ALL_MASK_ATTENTION_FUNCTIONS=Masks()),
        "transformers.modeling_flash_attention_utils": flash,
    }


def test_the_attention_registry_is_given_back(transformers_modules: dict[str, Any]) -> None:
    guard = Guard(State(transformers_modules))
    guard.look()
    registry = transformers_modules["transformers.modeling_utils"].ALL_ATTENTION_FUNCTIONS
    masks = transformers_modules["transformers.masking_utils"].ALL_MASK_ATTENTION_FUNCTIONS

    def leak() -> None:
        registry._global_mapping["sdpa"] = sum
        registry._global_mapping["mine"] = print
        registry._global_mapping["kernels-community/flash-attn2"] = repr
        registry._local_mapping["eager"] = abs
        masks._global_mapping.pop("sdpa")

    told = run(guard, leak)
    for part in (
        "ALL_ATTENTION_FUNCTIONS['sdpa'] (have sum, was len)",
        "ALL_ATTENTION_FUNCTIONS['mine'] (have print, was none)",
        "ALL_MASK_ATTENTION_FUNCTIONS['sdpa'] (have none, was min)",
    ):
        assert part in told
    assert "kernels-community" not in told, "a kernel that was loaded is a cache"
    assert registry._global_mapping == {"sdpa": len, "flash_attention_2": max, "kernels-community/flash-attn2": repr}
    assert registry._local_mapping == {}
    assert masks._global_mapping == {"sdpa": min}


def test_a_switch_of_flash_attention_is_normal_use_and_a_replaced_function_a_leak(
    transformers_modules: dict[str, Any],
) -> None:
    guard = Guard(State(transformers_modules))
    guard.look()
    flash = transformers_modules["transformers.modeling_flash_attention_utils"]
    assert run(guard, lambda: vars(flash).update(_loaded_implementation="flash_attention_3", _flash_fn=sum)) == ""
    assert (flash._loaded_implementation, flash._flash_fn) == ("flash_attention_2", len)
    assert "replaced by hand" in run(guard, lambda: vars(flash).update(_flash_fn=sum))
    assert flash._flash_fn is len


def test_the_first_flash_attention_stays_loaded(transformers_modules: dict[str, Any]) -> None:
    flash = transformers_modules["transformers.modeling_flash_attention_utils"]
    vars(flash).update(_loaded_implementation=None, _flash_fn=None, _flash_varlen_fn=None)
    guard = Guard(State(transformers_modules))
    guard.look()
    assert run(guard, lambda: vars(flash).update(_loaded_implementation="flash_attention_2", _flash_fn=len)) == ""
    assert flash._loaded_implementation == "flash_attention_2"


def test_answers_learned_under_a_test_are_forgotten_and_older_ones_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    from functools import lru_cache

    there = [True]
    module = ModuleType("transformers.utils.import_utils")

    @lru_cache
    def is_torch_cuda_available() -> bool:
        return there[0]

    @lru_cache
    def is_torch_tf32_available() -> bool:
        return there[0]

    vars(module).update(
        is_torch_cuda_available=is_torch_cuda_available, is_torch_tf32_available=is_torch_tf32_available
    )
    monkeypatch.setitem(sys.modules, "transformers.utils.import_utils", module)
    is_torch_tf32_available()
    answers = Answers()
    there[0] = False
    is_torch_cuda_available()
    there[0] = True
    answers.forget_new()
    assert is_torch_cuda_available() is True
    assert is_torch_tf32_available.cache_info().hits == 0
    assert is_torch_tf32_available.cache_info().currsize == 1


def test_a_warning_that_is_given_once_is_given_to_each_test(monkeypatch: pytest.MonkeyPatch) -> None:
    from functools import lru_cache

    @lru_cache(None)
    def warning_once(self: logging.Logger, *args: Any) -> None:
        self.warning(*args)

    monkeypatch.setattr(logging.Logger, "warning_once", warning_once, raising=False)
    heard: list[str] = []
    logger: Any = logging.getLogger("once")
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    with contextlib.closing(handler):
        for _ in range(2):
            let_warn_again()
            logger.warning_once("fallback")
            logger.warning_once("fallback")
    logger.removeHandler(handler)
    assert heard == ["fallback", "fallback"]


def test_torch_itself_may_put_cudnn_first() -> None:
    """On Hopper it does, at the first sdpa of a process (read on an H200): no leak, and it stays."""
    state, own, before = State(), [3, 1, 2, 0, 4], torch._C._get_sdp_priority_order()
    start = state.read()
    torch._C._set_sdp_priority_order(own)
    try:
        assert not state.leaks(state.read(), start)
        state.set_back(start)
        assert torch._C._get_sdp_priority_order() == own
        torch._C._set_sdp_priority_order([0, 1, 2, 3, 4])
        assert [leak.have for leak in state.leaks(state.read(), start)] == ["0 1 2 3 4"]
        state.set_back(start)
        assert torch._C._get_sdp_priority_order() == before
    finally:
        torch._C._set_sdp_priority_order(before)
