"""The two rules that keep the package in order: arrows point down, and low floors import no framework."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "pytest_cudaenv"

FLOOR = {"host": 0, "requirements": 1, "grants": 2, "ledger": 2, "verdict": 2, "distributed": 2, "fixtures": 3}
"""A folder imports from its own floor and those below; modules beside the folders are above them all."""

LEAVES = {"_version", "names", "compat"}
"""Modules that import nothing of the package, and that every floor may therefore import."""

UPWARD = {
    # Imported where a test has its grant, not while the module loads: fixtures adapt what stands beside the folders.
    ("fixtures", "cells"),
}


def imports(path: Path) -> list[tuple[str, bool]]:
    """(module, whether it is needed only by type checkers) of every import in a file, also inside functions."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    checked: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            checked |= {id(inner) for inner in ast.walk(node)}
    found: list[tuple[str, bool]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, id(node) in checked) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [(node.module, id(node) in checked)]
            if node.module == "pytest_cudaenv":
                found += [(f"{node.module}.{alias.name}", id(node) in checked) for alias in node.names]
    return found


SOURCES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", SOURCES, ids=[str(p.relative_to(PACKAGE)) for p in SOURCES])
def test_arrows_point_down(path: Path) -> None:
    place = path.relative_to(PACKAGE).parts[0]
    if place not in FLOOR:
        return
    for module, only_for_types in imports(path):
        parts = module.split(".")
        if parts[0] != "pytest_cudaenv" or len(parts) == 1 or only_for_types or parts[1] in LEAVES:
            continue
        if (place, parts[1]) in UPWARD:
            continue
        assert parts[1] in FLOOR, f"{path.name} in {place}/ imports {module}, which stands above every folder"
        assert FLOOR[parts[1]] <= FLOOR[place], f"{path.name} in {place}/ imports {module}, which is above it"


@pytest.mark.parametrize("floor", ["host", "requirements"])
def test_low_floors_import_no_framework(floor: str) -> None:
    for path in sorted((PACKAGE / floor).rglob("*.py")):
        modules = {m.split(".")[0] for m, _ in imports(path)} | {m for m, _ in imports(path)}
        frameworks = modules & {"pytest", "_pytest", "torch", "transformers", "pytest_cudaenv.compat"}
        assert not frameworks, f"{path.name} imports {frameworks}"


def test_private_names_of_pytest_are_used_in_one_file() -> None:
    """`_pytest`, and the attributes that compat.py documents, appear nowhere else."""
    private = {"_fixtureinfo", "_arg2fixturedefs", "_fixturemanager", "_use_item_location", "_ispytest", "callspec"}
    for path in SOURCES:
        if path.name == "compat.py":
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        used = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)} & private
        assert not used, f"{path.name} uses {used}"
        assert not [m for m, _ in imports(path) if m.split(".")[0] == "_pytest"], path.name
