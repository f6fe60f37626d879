"""The names by which a suite uses the plugin, and what ids and `pytest --markers` print. Imports nothing.

pytest loads this at every start; the modules that hold the rules are loaded by suites that use them.
"""

from __future__ import annotations

MARKER_LINES = (
    "requires_cuda(devices=1, memory=None, capability=None, driver=None, exclusive=False): that many NVIDIA "
    "devices; memory ('30GiB') is what the test uses on each, capability and driver (its CUDA) are PEP 440 specifiers",
    "requires_dtype(*names): native support for these dtypes, never emulation",
    "requires_bf16(): native bfloat16",
    "requires_fp8(): native 8-bit floating point",
    "requires_fp4(): native 4-bit floating point",
    "requires_tf32(): TensorFloat-32",
    "requires_attn_backend(name): an attention backend's package or Hub kernel, on a device for which it has code",
    "requires_flash_attn2(): FlashAttention-2",
    "requires_flash_attn3(): FlashAttention-3",
    "requires_flash_attn4(): FlashAttention-4",
    "requires_flex_attention(): FlexAttention",
    "requires_hub_kernels(*repos, version=None, revision=None): a usable pair of kernels and transformers, and a "
    "build of each repository for this host",
    "requires_quantization(method): a quantization method's packages and capability",
    "requires_package(*specs): installed packages, as PEP 508 strings; ' | ' separates alternatives",
    "requires_nccl(): NCCL and two devices",
    "cuda_isolated(): a device process of its own, where --cuda-isolation is not off",
    "attn_backends(*names, exclude=(), model=None): the attention backends of this test's cells",
    "dtypes(*names, exclude=()): the dtypes of this test's cells",
    "attn_sdpa_kernel(*kernels): sdpa runs these kernels alone while the test's body runs, the first possible one of "
    "'flash', 'efficient', 'cudnn', 'math'; the test fails where another ran",
    "attn_witness(runs=True): with runs=False, this test of a cell calls no attention, which is no finding; the test "
    "fails where it does",
    "xfail_cells(attn_backend=None, dtype=None, capability=None, reason='', issue='', until=None): cells that are "
    "known to fail; past the date `until` the test fails",
    "cuda_memory(peak=None, leak=None): the most device memory ('2GiB') that the test may use at once, and keep after "
    "its end ('0': none)",
    "hub_kernels(mapping=None, mode=None, executed=True, allow_fallback=(), use=None): the Hub kernels that the "
    "fixture hub_kernels puts into this test's models; use='both' generates it with kernels off and on",
    "cuda: added to every test that asks for a device, however it asked",
    "multi_gpu: added to every test that needs two devices or more",
)

SELECTION_MARKS = frozenset({"cuda", "multi_gpu"})
"""Marks that collection adds, for `-m`."""

MARKERS = frozenset(line.partition("(")[0] for line in MARKER_LINES if "(" in line.partition(":")[0])
"""Markers that declare something."""

DIST = "cuda"
"""What `--dist` is given for this plugin's scheduler."""

NEEDS_DEVICE = frozenset({"cuda_device", "cuda_devices", "cuda_memory"})
"""Fixtures that a test cannot have without a device."""

TAKES_DEVICE = frozenset({"device", "cell", "attn_backend", "mixed_precision", "hub_kernels"})
"""Fixtures that ask for a device where the host has one."""

FIXTURES = NEEDS_DEVICE | TAKES_DEVICE | {"dtype", "attn_witness", "assert_parity", "expectations"}

HUB_KERNELS = "hub_kernels"
"""The fixture, the marker, and the parameter of a test that is generated with kernels off and on."""

KERNEL_STATES = {"off": "kernels-off", "on": "kernels-on"}
"""That parameter's values, and their part of a test id."""

DTYPES: dict[str, str] = {
    "float64": "fp64",
    "float32": "fp32",
    "float16": "fp16",
    "bfloat16": "bf16",
    "float8_e4m3fn": "fp8_e4m3",
    "float8_e5m2": "fp8_e5m2",
    "float4_e2m1fn_x2": "fp4",
    "tf32": "tf32",
    "fp8_block": "fp8_block",
    "mxfp8": "mxfp8",
}
"""Canonical name of a dtype or format -> its part of a test id. torch's dtypes first, then formats without one."""
