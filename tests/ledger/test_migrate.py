"""The old names of decorators, made of this plugin's markers."""

from __future__ import annotations

import subprocess
import sys
import unittest
from typing import Any

import pytest
from parameterized import parameterized

from pytest_cudaenv.migrate import accelerate, transformers


def marks(target: Any) -> list[tuple[str, dict[str, Any]]]:
    return [(mark.name, dict(mark.kwargs)) for mark in target.pytestmark]


def test_on_functions_classes_and_methods() -> None:
    @transformers.require_torch_multi_gpu
    def test_function() -> None: ...

    @accelerate.require_cuda
    class Case(unittest.TestCase):
        @transformers.require_torch_n_accelerators(4)
        def test_four(self) -> None: ...

    assert marks(test_function) == [("requires_cuda", {"devices": 2})]
    assert marks(Case) == [("requires_cuda", {"devices": 1})]
    assert marks(Case.test_four) == [("requires_cuda", {"devices": 4})]


def test_with_and_without_arguments() -> None:
    @transformers.require_torch_large_accelerator
    def test_bare() -> None: ...

    @transformers.require_torch_large_accelerator(memory=40)
    def test_called() -> None: ...

    @transformers.require_cuda_capability_at_least(8, 9)
    def test_capability() -> None: ...

    assert marks(test_bare) == [("requires_cuda", {"memory": 20 * 1024**3, "exclusive": True})]
    assert marks(test_called) == [("requires_cuda", {"memory": 40 * 1024**3, "exclusive": True})]
    assert marks(test_capability) == [("requires_cuda", {"capability": ">=8.9"})]


def test_packages_and_versions() -> None:
    @transformers.require_peft
    @transformers.require_accelerate(min_version="1.2")
    @transformers.require_torch_greater_or_equal("2.6")
    def test_packages() -> None: ...

    found = [mark.args for mark in test_packages.pytestmark]  # type: ignore[attr-defined]
    assert found == [("torch>=2.6",), ("accelerate>=1.2",), ("peft",)]


def test_below_parameterized_expand() -> None:
    class Case(unittest.TestCase):
        @parameterized.expand([("a",), ("b",)])
        @transformers.require_flash_attn_3
        def test_expanded(self, name: str) -> None: ...

    assert [mark.name for mark in vars(Case)["test_expanded_0_a"].pytestmark] == ["requires_flash_attn3"]


def test_above_it_says_what_to_do() -> None:
    with pytest.raises(TypeError, match=r"@require_torch_gpu .*put @require_torch_gpu below @parameterized.expand"):
        transformers.require_torch_gpu(None)


@pytest.mark.parametrize("arguments", [{"memroy": 40}, {"memory": 1, "min": 2}])
def test_a_wrong_argument_is_an_error(arguments: dict[str, int]) -> None:
    with pytest.raises(TypeError):
        transformers.require_torch_large_gpu(**arguments)


def test_every_decorator_can_be_made() -> None:
    for module in (transformers, accelerate):
        for name in module.MARKS:
            assert repr(getattr(module, name)) == f"<{name} of pytest_cudaenv.migrate>"


def test_what_is_not_ours_is_the_librarys() -> None:
    library = pytest.importorskip("transformers.testing_utils")
    assert transformers.slow is library.slow
    assert transformers.require_torch_xpu is library.require_torch_xpu
    with pytest.raises(ImportError, match="require_torch_quantum"):
        from pytest_cudaenv.migrate.transformers import require_torch_quantum  # noqa: F401


def test_importing_them_imports_no_library() -> None:
    code = (
        "import sys; from pytest_cudaenv.migrate.transformers import require_torch_gpu, require_peft; "
        "from pytest_cudaenv.migrate.accelerate import require_cuda; "
        "print(sorted({'torch', 'transformers', 'accelerate'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
