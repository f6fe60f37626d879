"""What a `skipif` asks for, read from the source of its condition; nothing of it is executed.

A condition that skips on this host has said why. One that does not skip leaves no trace but its source: where that is
one of a few questions about CUDA compared with a number, the test needs the answer, on any host. Whatever else a
condition asks is left alone: what is not understood adds no requirement, and a sum of which one part is understood
needs that part at least.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from pytest_cudaenv.requirements.markers import requires_cuda
from pytest_cudaenv.requirements.requirement import Requirement

ONE = Requirement(devices=1)

AVAILABLE = ("cuda.is_available", "is_torch_cuda_available", "is_cuda_available", "current_platform.is_cuda")
COUNT = ("cuda.device_count", "cuda_device_count_stateless", "current_platform.device_count")
CAPABILITY = ("cuda.get_device_capability", "current_platform.get_device_capability")
PROPERTIES = ("cuda.get_device_properties",)

_DEPTH = 8


def read_condition(text: str, skips_if: bool = True) -> Requirement | None:
    """What a condition written as a string asks for (`skipif("torch.cuda.device_count() < 2")`)."""
    try:
        node = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError):
        return None
    return needs(node, not skips_if, {})


def read_whole_condition(text: str) -> Requirement | None:
    """What a condition that skips asks for, where it asks for nothing else."""
    try:
        node = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError):
        return None
    return needs(node, False, {}) if is_whole(node, False, {}) else None


def is_whole(node: ast.expr, wanted: bool, names: Mapping[str, ast.expr], depth: int = 0) -> bool:
    """Whether `needs` tells all that a condition asks for."""
    if depth > _DEPTH:
        return False
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return is_whole(node.operand, not wanted, names, depth + 1)
    if isinstance(node, ast.BoolOp):
        agrees = isinstance(node.op, ast.And) is wanted
        return agrees and all(is_whole(value, wanted, names, depth + 1) for value in node.values)
    if isinstance(node, ast.Name) and node.id in names:
        return is_whole(names[node.id], wanted, names, depth + 1)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.args and node.func.id in names:
        inner = names[node.func.id]
        if not isinstance(inner, ast.Attribute):  # a function of the module that returns one expression
            return wanted and is_whole(inner, wanted, names, depth + 1)
    return needs(node, wanted, names) is not None


def needs(node: ast.expr, wanted: bool, names: Mapping[str, ast.expr], depth: int = 0) -> Requirement | None:
    """What must be so for the condition to come out as `wanted`; None where its source does not tell.

    `names`: what a module binds once, at its top level.
    """
    if depth > _DEPTH:
        return None
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return needs(node.operand, not wanted, names, depth + 1)
    if isinstance(node, ast.BoolOp):
        # Not (a or b) is neither; (a and b) is both. The other two are either, of which nothing follows.
        if isinstance(node.op, ast.And) is not wanted:
            return None
        return _merged(needs(value, wanted, names, depth + 1) for value in node.values)
    if isinstance(node, ast.IfExp):
        return None
    if isinstance(node, ast.Name) and node.id in names:
        return needs(names[node.id], wanted, names, depth + 1)
    if isinstance(node, ast.Call) and wanted:
        return _call(node, names, depth)
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        return _comparison(node.left, node.ops[0], node.comparators[0], wanted, names)
    return None


def _merged(parts: object) -> Requirement | None:
    merged: Requirement | None = None
    for part in parts:  # type: ignore[attr-defined]
        if part is not None:
            merged = part if merged is None else merged.merged(part)
    return merged


def _call(node: ast.Call, names: Mapping[str, ast.expr], depth: int) -> Requirement | None:
    name = _called(node, names)
    if _is(name, AVAILABLE) and not node.args:
        return ONE
    if name.endswith("has_device_capability") and len(node.args) == 1:
        number = _constant(node.args[0], names)
        if isinstance(number, int) and 50 <= number < 1000:
            return requires_cuda(capability=f">={number // 10}.{number % 10}")
    if isinstance(node.func, ast.Name) and not node.args and not node.keywords and node.func.id in names:
        return needs(names[node.func.id], True, names, depth + 1)
    return None


def _comparison(
    left: ast.expr, operator: ast.cmpop, right: ast.expr, wanted: bool, names: Mapping[str, ast.expr]
) -> Requirement | None:
    swapped: dict[type[ast.cmpop], type[ast.cmpop]] = {
        ast.Lt: ast.Gt,
        ast.Gt: ast.Lt,
        ast.LtE: ast.GtE,
        ast.GtE: ast.LtE,
    }
    if _constant(left, names) is not None:
        left, right = right, left
        operator = swapped.get(type(operator), type(operator))()
    bound = _constant(right, names)
    if bound is None:
        return None
    if not wanted:
        opposite: dict[type[ast.cmpop], type[ast.cmpop]] = {
            ast.Lt: ast.GtE, ast.GtE: ast.Lt, ast.Gt: ast.LtE, ast.LtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq
        }  # fmt: skip
        if type(operator) not in opposite:
            return None
        operator = opposite[type(operator)]()
    if not isinstance(operator, (ast.GtE, ast.Gt)):
        return None  # at most, exactly, or something else: no need of this plugin's
    more = isinstance(operator, ast.Gt)
    subject, index = _subject(left, names)
    if subject == "count" and isinstance(bound, int):
        count = bound + more
        return Requirement(devices=count) if 1 <= count <= 1024 else None
    if subject == "capability":
        return _capability(bound, index, more)
    if subject == "major" and isinstance(bound, int):
        return requires_cuda(capability=f">={bound + more}.0")
    if subject == "memory" and isinstance(bound, (int, float)) and bound >= 2**20:
        return Requirement(devices=1, memory=int(bound), exclusive=True)
    return None


def _capability(bound: object, index: int | None, more: bool) -> Requirement | None:
    if isinstance(bound, tuple) and index is None and bound and all(isinstance(n, int) for n in bound):
        major, minor = (*bound, 0)[:2]
        return requires_cuda(capability=f"{'>' if more and len(bound) == 2 else '>='}{major}.{minor}")
    if isinstance(bound, int) and index == 0:
        return requires_cuda(capability=f">={bound + more}.0")
    return None


def _subject(node: ast.expr, names: Mapping[str, ast.expr], depth: int = 0) -> tuple[str, int | None]:
    """What is compared: count, capability (with the index into it), major, memory; empty for anything else."""
    if depth > _DEPTH:
        return "", None
    if isinstance(node, ast.Name) and node.id in names:
        return _subject(names[node.id], names, depth + 1)
    if isinstance(node, ast.IfExp):  # CAPABILITY = get_device_capability() if is_available() else (0, 0)
        return _subject(node.body, names, depth + 1)
    if isinstance(node, ast.Call):
        name = _called(node, names)
        if _is(name, COUNT) and not node.args:
            return "count", None
        if _is(name, CAPABILITY) and _first_device(node):
            return "capability", None
        if isinstance(node.func, ast.Name) and not node.args and node.func.id in names:
            return _subject(names[node.func.id], names, depth + 1)
    if isinstance(node, ast.Subscript):
        subject, index = _subject(node.value, names, depth + 1)
        place = _constant(node.slice, names)
        if subject == "capability" and index is None and isinstance(place, int):
            return subject, place
    if isinstance(node, ast.Attribute) and isinstance(node.value, (ast.Call, ast.Name)):
        owner = names.get(node.value.id) if isinstance(node.value, ast.Name) else node.value
        if isinstance(owner, ast.Call) and _is(_called(owner, names), PROPERTIES) and _first_device(owner):
            return {"total_memory": "memory", "major": "major"}.get(node.attr, ""), None
    return "", None


def _first_device(node: ast.Call) -> bool:
    arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
    return all(isinstance(a, ast.Constant) and a.value in {0, None, "cuda", "cuda:0"} for a in arguments)


def _is(name: str, known: tuple[str, ...]) -> bool:
    return any(name == k or name.endswith(f".{k}") for k in known)


def _called(node: ast.Call, names: Mapping[str, ast.expr]) -> str:
    """The dotted name of what is called, also where it was imported from torch.cuda under another."""
    if isinstance(node.func, ast.Name) and isinstance(imported := names.get(node.func.id), ast.Attribute):
        return dotted(imported)
    return dotted(node.func)


def dotted(node: ast.expr) -> str:
    """`torch.cuda.device_count` of the expression that spells it; empty for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        owner = dotted(node.value)
        return f"{owner}.{node.attr}" if owner else ""
    return ""


def _constant(
    node: ast.expr, names: Mapping[str, ast.expr], depth: int = 0
) -> int | float | str | tuple[object, ...] | None:
    """A number, string or tuple of numbers, also as a product, power or shift of numbers (`40 * 1024**3`)."""
    if depth > _DEPTH:
        return None
    if (
        isinstance(node, ast.Constant)
        and isinstance(node.value, (int, float, str))
        and not isinstance(node.value, bool)
    ):
        return node.value
    if isinstance(node, ast.Tuple):
        values = tuple(_constant(e, names, depth + 1) for e in node.elts)
        return None if None in values else values
    if isinstance(node, ast.Name) and node.id in names:
        return _constant(names[node.id], names, depth + 1)
    if isinstance(node, ast.BinOp):
        left, right = _constant(node.left, names, depth + 1), _constant(node.right, names, depth + 1)
        if isinstance(left, (int, float)) and isinstance(right, (int, float)) and abs(right) < 2**40:
            if isinstance(node.op, ast.Mult):
                return left * right
            small = isinstance(left, int) and isinstance(right, int) and 0 <= right <= 64 and abs(left) < 2**16
            if small and isinstance(node.op, ast.Pow):
                return int(left**right)
            if small and isinstance(node.op, ast.LShift):
                return int(left) << int(right)
    return None


# Where conditions stand in a file ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Skip:
    """One decorator that may skip, as it is written."""

    requirement: Requirement | None
    """What the tests that it lets through need; None where its source does not tell."""
    where: str
    """`skipif(torch.cuda.device_count() < 2)`."""
    always: bool = False
    """It skips on every host."""
    is_whole: bool = False
    """The requirement is all that its condition asks for."""
    reason: str | None = None
    """Its words, where they are a literal."""


@dataclass
class Source:
    """What a file of tests says about skipping."""

    module: tuple[Skip, ...] = ()
    """Its `pytestmark`."""
    classes: dict[str, tuple[Skip, ...]] = field(default_factory=dict)
    """By qualified name."""
    functions: dict[tuple[str, int], tuple[Skip, ...]] = field(default_factory=dict)
    """By name, and the line on which its definition begins, decorators included."""
    mistakes: tuple[tuple[int, str], ...] = ()
    """(line, what is wrong there): skips that do not skip, or that hide more than they say."""


def read_source(text: str) -> Source:
    """The skips of a file; an empty one for what is no Python."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return Source()
    source = Source()
    names = bound_once(tree)
    for statement in tree.body:
        if isinstance(statement, ast.Assign) and [dotted(t) for t in statement.targets] == ["pytestmark"]:
            marks = statement.value.elts if isinstance(statement.value, (ast.List, ast.Tuple)) else [statement.value]
            source.module += tuple(skip for mark in marks if (skip := _skip(mark, names)) is not None)
    _collect(tree.body, "", names, source)
    source.mistakes = tuple(sorted(_mistakes(tree)))
    return source


_DECORATORS = {"unittest.skip", "unittest.skipIf", "unittest.skipUnless", "pytest.mark.skip", "pytest.mark.skipif"}
_SKIPS = {"pytest.skip", "self.skipTest"}
_EVERYTHING = {"Exception", "BaseException"}


def _mistakes(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and dotted(node.value.func) in _DECORATORS:
            yield node.lineno, f"{dotted(node.value.func)}(…) as a statement skips nothing"
        if isinstance(node, ast.ExceptHandler) and (node.type is None or dotted(node.type) in _EVERYTHING):
            calls = [n for statement in node.body for n in ast.walk(statement) if isinstance(n, ast.Call)]
            if any(dotted(call.func) in _SKIPS for call in calls) and not any(
                isinstance(n, ast.If) for statement in node.body for n in ast.walk(statement)
            ):
                caught = f"except {dotted(node.type)}" if node.type is not None else "except"
                yield node.lineno, f"{caught}: any defect becomes a skip"


def _collect(body: list[ast.stmt], outer: str, names: Mapping[str, ast.expr], source: Source) -> None:
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            skips = tuple(skip for d in node.decorator_list if (skip := _skip(d, names)) is not None)
            if isinstance(node, ast.ClassDef):
                name = f"{outer}{node.name}"
                if skips:
                    source.classes[name] = skips
                _collect(node.body, f"{name}.", names, source)
                continue
            if (first := _skips_first(node)) is not None:
                skips += (first,)
            if skips:
                line = min([node.lineno, *(d.lineno for d in node.decorator_list)])
                source.functions[node.name, line] = skips
        elif isinstance(node, (ast.If, ast.Try)):
            _collect([*node.body, *node.orelse], outer, names, source)


def bound_once(tree: ast.Module) -> dict[str, ast.expr]:
    """Names that a module binds once at its top level, with their expression; also functions that only return one."""
    found: dict[str, ast.expr] = {}
    seen: set[str] = set()
    for node in ast.walk(tree):
        targets: list[str] = []
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            targets = [node.id]
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)):
            targets = [node.name]
        for name in targets:
            if name in seen:
                found[name] = ast.Constant(value=None)  # bound twice: nobody knows which
            seen.add(name)
    twice = set(found)
    found.clear()
    for statement in tree.body:
        if (
            isinstance(statement, ast.Assign)
            and len(statement.targets) == 1
            and isinstance(statement.targets[0], ast.Name)
        ):
            found[statement.targets[0].id] = statement.value
        elif isinstance(statement, ast.ImportFrom) and statement.module == "torch.cuda":
            owner = ast.Attribute(ast.Name("torch", ast.Load()), "cuda", ast.Load())
            for alias in statement.names:
                found[alias.asname or alias.name] = ast.Attribute(owner, alias.name, ast.Load())
        elif isinstance(statement, ast.FunctionDef) and not statement.args.args and not statement.decorator_list:
            body = [s for s in statement.body if not (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))]
            if len(body) == 1 and isinstance(body[0], ast.Return) and body[0].value is not None:
                found[statement.name] = body[0].value
    return {name: value for name, value in found.items() if name not in twice}


def _skip(node: ast.expr, names: Mapping[str, ast.expr], depth: int = 0) -> Skip | None:
    """The skip that a decorator is, if it is one."""
    if isinstance(node, ast.Name) and node.id in names and depth < _DEPTH:
        return _skip(names[node.id], names, depth + 1)
    called = node.func if isinstance(node, ast.Call) else node
    name = dotted(called)
    last = name.rpartition(".")[2]
    if name in {"unittest.skip", "skip"} and isinstance(node, ast.Call):
        return Skip(None, f"@{name}", always=True)
    if name.endswith("mark.skip"):
        return Skip(None, f"@{name}", always=True)
    if not isinstance(node, ast.Call) or not (last in {"skipIf", "skipUnless"} or name.endswith("mark.skipif")):
        return None
    condition = node.args[0] if node.args else next((k.value for k in node.keywords if k.arg == "condition"), None)
    if condition is None:
        return None
    wanted = last == "skipUnless"
    whole = False
    if isinstance(condition, ast.Constant) and isinstance(condition.value, str):
        requirement = read_condition(condition.value)
        whole = read_whole_condition(condition.value) is not None
    else:
        requirement = needs(condition, wanted, names)
        whole = is_whole(condition, wanted, names)
    always = isinstance(condition, ast.Constant) and isinstance(condition.value, bool) and condition.value is not wanted
    return Skip(requirement, f"{last}({ast.unparse(condition)})", always, whole, _words(node, names))


def _words(node: ast.Call, names: Mapping[str, ast.expr]) -> str | None:
    """The reason that a skip gives, where it is a literal or a name of one."""
    positional = node.args[1] if len(node.args) > 1 else None
    reason = next((k.value for k in node.keywords if k.arg == "reason"), positional)
    if isinstance(reason, ast.Name):
        reason = names.get(reason.id)
    return reason.value if isinstance(reason, ast.Constant) and isinstance(reason.value, str) else None


def _skips_first(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Skip | None:
    """A body whose first statement skips: it skips on every host."""
    body = node.body
    if body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
        body = body[1:]
    if not body or not isinstance(body[0], ast.Expr) or not isinstance(body[0].value, ast.Call):
        return None
    name = dotted(body[0].value.func)
    return Skip(None, f"{name}()", always=True) if name in {"pytest.skip", "self.skipTest"} else None
