"""Golden files: JSON, one line a value, `{"name": {"(9, 0, 'sdpa-bf16')": value, "cpu": value}}`.

Several processes of a run, and of several hosts in turn, write into one: each adds its own entries under a lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Hashable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pytest_cudaenv.verdict.expectation_keys import parse_key, read_key, write_key

Contents = dict[str, dict[Hashable, Any]]
"""Name -> key -> value."""


def read(path: Path) -> Contents:
    """What a golden file expects; nothing where there is no file.

    Raises ValueError, which names the file, for what no golden file is.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    try:
        found = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_without_repetition)
        if not isinstance(found, dict) or not all(isinstance(values, dict) for values in found.values()):
            raise ValueError('write {"name": {"(9, 0)": value, …}, …}')
        return {name: {read_key(key): value for key, value in values.items()} for name, values in found.items()}
    except ValueError as error:
        raise ValueError(f"{shown(path)} is no golden file: {error}") from None


def _refuse_constant(word: str) -> Any:
    raise ValueError(f"{word} is no finite number")


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name or key stands in it twice")
    return found


def write(path: Path, name: str, key: Hashable, value: Any) -> None:
    """Put one value into a golden file, in place of the one with this key; the file and its folder are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with _alone(path.parent):
        contents = read(path)
        values = contents.setdefault(name, {})
        for other in [known for known in values if parse_key(known) == parse_key(key)]:
            del values[other]  # the same key, as somebody else spells it
        values[key] = value
        beside = path.with_suffix(f".{os.getpid()}.tmp")
        beside.write_text(text_of(contents), encoding="utf-8")
        os.replace(beside, path)


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """A block in which no other process of this host writes into the folder."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def text_of(contents: Mapping[str, Mapping[Hashable, Any]]) -> str:
    """A golden file's text: sorted, one line a value, so that a change of one is a change of one line."""
    names = []
    for name, values in sorted(contents.items()):
        written = sorted((write_key(key), value) for key, value in values.items())
        lines = [f"    {_json(key)}: {_json(value)}" for key, value in written]
        names.append(f"  {_json(name)}: {{\n" + ",\n".join(lines) + "\n  }")
    return "{\n" + ",\n".join(names) + "\n}\n"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, sort_keys=True)


def shown(path: Path) -> str:
    """The path as a message has it: from the current folder where it is below it."""
    with contextlib.suppress(ValueError, OSError):
        return str(path.relative_to(Path.cwd()))
    return str(path)
