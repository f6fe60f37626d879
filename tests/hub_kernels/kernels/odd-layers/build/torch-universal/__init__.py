"""Layers that break a rule or their word, each in one way."""

from . import layers

__all__ = ["layers"]
