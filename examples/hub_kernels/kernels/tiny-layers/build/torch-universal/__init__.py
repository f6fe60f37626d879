"""RMSNorm, SiLU and rotary embedding: a Triton path for CUDA, a torch path for everything else."""

from . import layers
from ._ops import rms_norm, rotary, silu

__all__ = ["layers", "rms_norm", "rotary", "silu"]
