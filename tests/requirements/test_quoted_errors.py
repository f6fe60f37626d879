"""What a reason quotes of an import error: the part that tells."""

from __future__ import annotations

import pytest

from pytest_cudaenv.requirements.reason import quoted


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        ("ModuleNotFoundError: No module named 'cutlass'", "No module named 'cutlass'"),
        (
            "ImportError: /opt/venv/lib/python3.12/site-packages/flash_attn_2_cuda.so: undefined symbol: _ZN3c10",
            "flash_attn_2_cuda.so: undefined symbol: _ZN3c10",
        ),
        ("OSError: libcudart.so.12: cannot open shared object file", "libcudart.so.12: cannot open shared object file"),
        ("RuntimeError: 0 active drivers ([])", "RuntimeError: 0 active drivers ([])"),
        ("ImportError: cannot import name 'a/b' from 'c' (/x/y/c.py)", "cannot import name 'a/b' from 'c' (c.py)"),
        ("SystemExit: 1", "SystemExit: 1"),
    ],
)
def test_quoted(error: str, shown: str) -> None:
    assert quoted(error) == shown
