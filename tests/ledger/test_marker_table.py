"""The table of a project's own markers."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_cudaenv.ledger.marker_table import MarkerTableError, parse_table
from pytest_cudaenv.requirements.requirement import Requirement

GB = 10**9


@pytest.mark.parametrize(
    ("line", "args", "kwargs", "asked"),
    [
        ("multi_gpu_tests = requires_cuda(devices=2)", (), {}, Requirement(devices=2)),
        ("multi_gpu_tests = requires_cuda(devices=2)", ("whatever",), {"a": 1}, Requirement(devices=2)),
        ("gpu = requires_cuda", (), {}, Requirement(devices=1)),
        ("distributed(num_gpus=n) = requires_cuda(devices=n)", (), {"num_gpus": 4}, Requirement(devices=4)),
        ("distributed(num_gpus=n) = requires_cuda(devices=n)", (4,), {}, None),
        ("gpus(n) = requires_cuda(n)", (3,), {}, Requirement(devices=3)),
        ("gpus(n) = requires_cuda(n)", (), {}, None),
        ('large(min_gb=m) = requires_cuda(memory="{m}GB")', (), {"min_gb": 40}, Requirement(devices=1, memory=40 * GB)),
        ('arch("h") = requires_cuda(capability=">=9.0")', ("h",), {}, Requirement(devices=1, capability=(">=9.0",))),
        ('arch("h") = requires_cuda(capability=">=9.0")', ("b",), {}, None),
        ("bf16 = requires_bf16()", (), {}, Requirement(devices=1, dtypes=("bfloat16",))),
        ("solo = cuda_isolated()", (), {}, Requirement(isolated=True)),
    ],
)
def test_lines(line: str, args: tuple[Any, ...], kwargs: dict[str, Any], asked: Requirement | None) -> None:
    (parsed,) = parse_table([line])
    assert parsed.requirement(args, kwargs) == asked


def test_empty_lines_and_comments_are_left_out() -> None:
    assert len(parse_table(["", "  # what the launcher did", "gpu_4 = requires_cuda(devices=4)"])) == 1


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("gpu_4", "no equals sign"),
        ("gpu_4 = attn_backends('sdpa')", "choose from requires_cuda"),
        ("gpu_4 = requires_gpus(4)", "'requires_gpus' is no marker"),
        ("gpu_4 = requires_cuda(device=4)", "unexpected keyword argument 'device'"),
        ("gpu_4 = requires_cuda(devices=0)", "1 or more"),
        ("gpus(n) = requires_cuda(devices=m)", "'m' is no argument on the left"),
        ('large(m) = requires_cuda(memory="{gb}GB")', "'gb' is no argument on the left"),
        ('large(m) = requires_cuda(memory="{}GB")', "is no name"),
        ('large(m) = requires_cuda(memory="{m.real}GB")', "is no name"),
        ("gpus(n) = requires_cuda(devices=n+1)", "neither a constant nor a name"),
        ("gpus(n) = requires_cuda(**n)", "** says nothing"),
        ("gpus(n = requires_cuda", "no equals sign"),
        ("pytest.mark.gpu = requires_cuda", "is no marker"),
        ("gpu = __import__('os').system('true')", "is no marker"),
    ],
)
def test_what_is_no_line_says_why_and_the_grammar(line: str, why: str) -> None:
    with pytest.raises(MarkerTableError) as caught:
        parse_table([line])
    assert why in str(caught.value)
    assert "write MARKER = requires_" in str(caught.value)


def test_a_value_of_the_wrong_kind_is_the_markers_own_error() -> None:
    (line,) = parse_table(["gpus(n) = requires_cuda(devices=n)"])
    with pytest.raises(ValueError, match="write a number of devices"):
        line.requirement(("two",), {})


@given(st.lists(st.text(max_size=60), max_size=3))
def test_any_lines_are_a_table_or_an_error_of_ours(lines: list[str]) -> None:
    with contextlib.suppress(MarkerTableError):
        assert len(parse_table(lines)) <= len(lines)
