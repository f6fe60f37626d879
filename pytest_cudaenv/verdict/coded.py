"""The form of every error of the verdict that a test can meet: its code first."""

from __future__ import annotations


class CodedError(Exception):
    """An error whose text begins with its stable code, `[parity-empty] …`; to be derived from beside another class."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(f"[{code}] {text}")
        self.code = code
