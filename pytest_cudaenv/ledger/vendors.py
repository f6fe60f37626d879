"""Hardware that is no CUDA device, as skips name it."""

from __future__ import annotations

from pytest_cudaenv.requirements.reason import Reason, brief

VENDORS = {
    "rocm": "an AMD GPU (ROCm)",
    "xpu": "an Intel XPU",
    "hpu": "an Intel Gaudi (HPU)",
    "npu": "an Ascend NPU",
    "mlu": "a Cambricon MLU",
    "musa": "a Moore Threads GPU (MUSA)",
    "sdaa": "a Tecorigin SDAA",
    "neuron": "an AWS Neuron core",
    "tpu": "a TPU",
    "xla": "a TorchXLA device",
    "mps": "an Apple GPU (MPS)",
    "rngd": "a FuriosaAI RNGD",
}
"""Name, as torch and its back ends spell it -> what to call it in a reason."""


def vendor_reason(vendor: str, count: int = 1) -> Reason:
    """Other hardware is needed; `non-xpu`: anything but that is."""
    if vendor.startswith("non-"):
        other = VENDORS[vendor.removeprefix("non-")]
        return brief(f"vendor-{vendor}", f"needs something other than {other}", "that", "Run it on another runner.")
    what = VENDORS[vendor] if count == 1 else f"{count} devices like {VENDORS[vendor]}"
    return brief(f"vendor-{vendor}", f"needs {what}", "none", f"Run it on a runner with {VENDORS[vendor]}.")
