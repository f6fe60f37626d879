"""The layers that a mapping can name; each takes the arguments, and the weights, of what it replaces."""

import torch
from torch import nn

from ._ops import rms_norm, rotary, silu


class RMSNorm(nn.Module):
    has_backward = True
    can_torch_compile = True
    weight: torch.Tensor
    variance_epsilon: float

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return rms_norm(hidden_states, self.weight, self.variance_epsilon)


class SiLU(nn.Module):
    has_backward = True
    can_torch_compile = True

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return silu(input)


class Rotary(nn.Module):
    has_backward = True
    can_torch_compile = True

    def forward(self, q, k, cos, sin, unsqueeze_dim=1):
        return rotary(q, k, cos, sin, unsqueeze_dim)
