"""Layers that break a rule or their word, each in one way."""

import torch
from torch import nn


def _norm(x, weight, eps):
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


class InferenceOnly(nn.Module):
    has_backward = False

    def forward(self, hidden_states):
        return _norm(hidden_states, self.weight, self.variance_epsilon)


class Detached(nn.Module):
    """Claims a backward, as absent means true, and has none."""

    def forward(self, hidden_states):
        with torch.no_grad():
            return _norm(hidden_states, self.weight, self.variance_epsilon)


class Breaks(nn.Module):
    """Claims to compile, and breaks the graph."""

    can_torch_compile = True

    def forward(self, hidden_states):
        torch._dynamo.graph_break()
        return _norm(hidden_states, self.weight, self.variance_epsilon)


class Wrong(nn.Module):
    """Forgets the weight's last digit."""

    def forward(self, hidden_states):
        return _norm(hidden_states, self.weight, self.variance_epsilon) * 1.01


class BadInit(nn.Module):
    def __init__(self):
        super().__init__()

    def forward(self, hidden_states):
        return hidden_states


class BadMember(nn.Module):
    extra = 1

    def forward(self, hidden_states):
        return hidden_states


class BadNumber(nn.Module):
    def forward(self, a, b):
        return a


class BadKind(nn.Module):
    def forward(self, *hidden_states):
        return hidden_states


class NotAModule:
    def forward(self, hidden_states):
        return hidden_states
