"""Every device of the catalogue against every rule: what is expected is written out, and not computed."""

from __future__ import annotations

import pytest
from fabricated_hosts import device, everything, software

from pytest_cudaenv.host.catalog import CATALOG
from pytest_cudaenv.requirements import attention, precision, quantization

# .  runs          n  dtype-native       c  attn-capability       q  quant-capability
MATRIX = """
key         bf16 tf32 fp8  fp8_block mxfp8 fp4  | eager sdpa flex FA2  FA3  FA4  | fp8  mxfp8 mxfp4 fbgemm nvfp4 fpquant
p100        n    n    n    n         n     n    | .     .    c    c    c    c    | q    q     q     q      q     q
p40         n    n    n    n         n     n    | .     .    c    c    c    c    | q    q     q     q      q     q
v100        n    n    n    n         n     n    | .     .    .    c    c    c    | q    q     q     q      q     q
v100-32     n    n    n    n         n     n    | .     .    .    c    c    c    | q    q     q     q      q     q
xavier      n    n    n    n         n     n    | .     .    .    c    c    c    | q    q     q     q      q     q
t4          n    n    n    n         n     n    | .     .    .    c    c    c    | q    q     .     q      q     q
rtx2080ti   n    n    n    n         n     n    | .     .    .    c    c    c    | q    q     .     q      q     q
a100        .    .    n    n         n     n    | .     .    .    .    c    c    | q    q     .     q      q     q
a100-80     .    .    n    n         n     n    | .     .    .    .    c    c    | q    q     .     q      q     q
a30         .    .    n    n         n     n    | .     .    .    .    c    c    | q    q     .     q      q     q
a10         .    .    n    n         n     n    | .     .    .    .    c    c    | q    q     .     q      q     q
a10g        .    .    n    n         n     n    | .     .    .    .    c    c    | q    q     .     q      q     q
rtx3090     .    .    n    n         n     n    | .     .    .    .    c    c    | q    q     .     q      q     q
orin        .    .    n    n         n     n    | .     .    .    .    c    c    | q    q     .     q      q     q
l4          .    .    .    n         n     n    | .     .    .    .    c    c    | .    .     .     q      q     q
l40s        .    .    .    n         n     n    | .     .    .    .    c    c    | .    .     .     q      q     q
rtx4090     .    .    .    n         n     n    | .     .    .    .    c    c    | .    .     .     q      q     q
h100        .    .    .    .         n     n    | .     .    .    .    .    .    | .    .     .     .      q     q
h100-pcie   .    .    .    .         n     n    | .     .    .    .    .    .    | .    .     .     .      q     q
h200        .    .    .    .         n     n    | .     .    .    .    .    .    | .    .     .     .      q     q
gh200       .    .    .    .         n     n    | .     .    .    .    .    .    | .    .     .     .      q     q
b200        .    .    .    .         .     .    | .     .    .    .    c    .    | .    .     .     .      .     .
gb200       .    .    .    .         .     .    | .     .    .    .    c    .    | .    .     .     .      .     .
b300        .    .    .    .         .     .    | .     .    .    .    c    .    | .    .     .     .      q     .
gb300       .    .    .    .         .     .    | .     .    .    .    c    .    | .    .     .     .      q     .
thor        .    .    .    .         n     n    | .     .    .    .    c    .    | .    .     .     .      q     .
rtx5090     .    .    .    .         n     .    | .     .    .    .    c    .    | .    .     .     .      .     .
rtxpro6000  .    .    .    .         n     .    | .     .    .    .    c    .    | .    .     .     .      .     .
gb10        .    .    .    .         n     n    | .     .    .    .    c    .    | .    .     .     .      q     .
"""
CODES = {".": [], "n": ["dtype-native"], "c": ["attn-capability"], "q": ["quant-capability"]}
BACKENDS = {
    "eager": "eager",
    "sdpa": "sdpa",
    "flex": "flex_attention",
    "FA2": "flash_attention_2",
    "FA3": "flash_attention_3",
    "FA4": "flash_attention_4",
}
METHODS = {"fp8": "fp8", "fbgemm": "fbgemm_fp8", "fpquant": "fp_quant"}
NO_LIMIT = [
    *("bitsandbytes", "gptq", "awq", "aqlm", "auto-round", "quanto", "hqq", "torchao", "compressed-tensors"),
    *("fouroversix", "eetq", "higgs", "spqr", "vptq", "bitnet", "quark", "sinq", "gguf", "gemma"),
]

HEADER, *ROWS = [[part.split() for part in line.split("|")] for line in MATRIX.strip().splitlines()]
(_, *DTYPE_COLUMNS), BACKEND_COLUMNS, METHOD_COLUMNS = HEADER


def cells(part: int, columns: list[str]) -> list[pytest.param]:
    """(device, column, expected codes) of one block of the matrix."""
    found = []
    for row in ROWS:
        key, values = row[0][0], row[part][1:] if part == 0 else row[part]
        found += [
            pytest.param(key, column, CODES[value], id=f"{key}-{column}")
            for column, value in zip(columns, values, strict=True)
        ]
    return found


def test_every_device_of_the_catalogue_has_a_row() -> None:
    assert [row[0][0] for row in ROWS] == list(CATALOG)


@pytest.mark.parametrize(("key", "dtype", "expected"), cells(0, DTYPE_COLUMNS))
def test_dtypes(key: str, dtype: str, expected: list[str]) -> None:
    assert [r.code for r in precision.dtype_reasons(precision.dtype_name(dtype), device(key))] == expected


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
@pytest.mark.parametrize("key", CATALOG)
def test_dtypes_that_every_device_computes(key: str, dtype: str) -> None:
    assert precision.dtype_reasons(dtype, device(key)) == []


@pytest.mark.parametrize(("key", "column", "expected"), cells(1, BACKEND_COLUMNS))
def test_backends_with_their_package(key: str, column: str, expected: list[str]) -> None:
    name = BACKENDS[column]
    assert [r.code for r in attention.device_reasons(name, None, device(key), everything())] == expected
    assert attention.software_reasons(name, everything(), None) == []


@pytest.mark.parametrize(("key", "column", "expected"), cells(1, BACKEND_COLUMNS))
def test_backends_without_their_package(key: str, column: str, expected: list[str]) -> None:
    # The device is judged all the same, so that a reader learns of both at once.
    name = BACKENDS[column]
    assert [r.code for r in attention.device_reasons(name, None, device(key), software())] == expected
    missing = ["attn-missing"] if column.startswith("FA") else []
    assert [r.code for r in attention.software_reasons(name, software(), None)] == missing


@pytest.mark.parametrize(("key", "column", "expected"), cells(2, METHOD_COLUMNS))
def test_quantization(key: str, column: str, expected: list[str]) -> None:
    method = METHODS.get(column, column)
    assert [r.code for r in quantization.device_reasons(method, device(key))] == expected


@pytest.mark.parametrize("method", NO_LIMIT)
def test_quantization_that_every_device_computes(method: str) -> None:
    assert [quantization.device_reasons(method, device(key)) for key in CATALOG] == [[]] * len(CATALOG)


def test_metal_runs_on_no_cuda_device() -> None:
    assert [r.code for r in quantization.device_reasons("metal", device("h100"))] == ["quant-device"]


def test_every_method_is_in_these_tables() -> None:
    columns = [METHODS.get(c, c) for c in METHOD_COLUMNS]
    assert sorted([*columns, *NO_LIMIT, "metal"]) == sorted(quantization.METHODS)


# The CPU, in float32 and where the backend wants it in bfloat16.
ON_CPU = {
    "eager": [],
    "sdpa": [],
    "flex_attention": ["attn-device"],
    "flash_attention_2": ["attn-device"],
    "flash_attention_3": ["attn-device"],
    "flash_attention_4": ["attn-device"],
}
NOT_ON_CPU = {"fp8", "mxfp8", "fbgemm_fp8", "nvfp4", "fp_quant", "eetq", "higgs", "spqr", "vptq", "metal"}


@pytest.mark.parametrize("name", ON_CPU)
def test_backends_on_the_cpu(name: str) -> None:
    assert [r.code for r in attention.device_reasons(name, "bfloat16", None, everything())] == ON_CPU[name]


@pytest.mark.parametrize("method", quantization.METHODS)
def test_quantization_on_the_cpu(method: str) -> None:
    expected = ["quant-device"] if method in NOT_ON_CPU else []
    assert [r.code for r in quantization.device_reasons(method, None)] == expected


# backend, dtype, device -> codes: dtypes that the backend does not take, and those that the device emulates.
CELLS = [
    ("eager", "float32", "p100", []),
    ("eager", "bfloat16", "t4", ["dtype-native"]),
    ("sdpa", "bfloat16", "v100", ["dtype-native"]),
    ("sdpa", "float8_e4m3fn", "h100", ["attn-dtype"]),
    ("flex_attention", "bfloat16", "t4", ["dtype-native"]),
    ("flash_attention_2", "float32", "h100", ["attn-dtype"]),
    ("flash_attention_2", "float16", "a100", []),
    ("flash_attention_2", "bfloat16", "t4", ["dtype-native", "attn-capability"]),
    ("flash_attention_3", "float64", "h100", ["attn-dtype"]),
    ("flash_attention_3", "float8_e4m3fn", "h200", []),
    ("flash_attention_4", "float8_e4m3fn", "b200", []),
    ("flash_attention_4", "float8_e4m3fn", "b300", []),
    ("flash_attention_4", "float8_e4m3fn", "rtx5090", ["attn-dtype"]),
    ("flash_attention_4", "float8_e4m3fn", "h100", ["attn-dtype"]),
    ("flash_attention_4", "float8_e4m3fn", "a100", ["attn-dtype", "dtype-native", "attn-capability"]),
]


@pytest.mark.parametrize(("name", "dtype", "key", "expected"), CELLS)
def test_cells(name: str, dtype: str, key: str, expected: list[str]) -> None:
    assert [r.code for r in attention.device_reasons(name, dtype, device(key), everything())] == expected


@pytest.mark.parametrize(
    ("name", "dtype", "possible"),
    [
        ("eager", "float32", True),
        ("sdpa", "bfloat16", True),
        ("flash_attention_2", "float32", False),
        ("flash_attention_2", "float8_e4m3fn", False),
        ("flash_attention_3", "float8_e4m3fn", True),
        ("flash_attention_4", "tf32", False),
        ("kernels-community/flash-attn3", "float32", False),
        ("some-org/attention", "float32", True),
    ],
)
def test_pairs_that_no_device_could_run(name: str, dtype: str, possible: bool) -> None:
    assert attention.takes_dtype(name, dtype) is possible


# FA4 on 10.x and 11.0 has holes in the sizes that it takes.
HEAD_DIMS = [
    ("flash_attention_2", 256, None, False),
    ("flash_attention_2", 264, None, True),
    ("flash_attention_2", 20, None, False),
    ("flash_attention_3", 100, None, True),
    ("flash_attention_3", 264, "h100", True),
    ("flash_attention_4", 160, "h100", False),
    ("flash_attention_4", 160, "b200", True),
    ("flash_attention_4", 160, "thor", True),
    ("flash_attention_4", 160, None, False),
    ("flash_attention_4", 192, "b200", False),
    ("flash_attention_4", 256, "b300", False),
    ("flash_attention_4", 4, "h100", True),
    ("sdpa", 500, "h100", False),
    ("kernels-community/flash-attn2", 500, None, False),
]


@pytest.mark.parametrize(("name", "head_dim", "key", "refused"), HEAD_DIMS)
def test_head_sizes(name: str, head_dim: int, key: str | None, refused: bool) -> None:
    reason = attention.head_dim_reason(name, head_dim, device(key) if key else None)
    assert (reason is not None and reason.code == "attn-head-dim") is refused
