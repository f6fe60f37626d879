"""What the source of a `skipif` is taken to ask for."""

from __future__ import annotations

import ast
import textwrap
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_cudaenv.host.catalog import CATALOG, simulated_host
from pytest_cudaenv.host.devices import Host
from pytest_cudaenv.host.mask import read_mask
from pytest_cudaenv.host.software import Software, TorchBuild
from pytest_cudaenv.ledger.conditions import Source, needs, read_condition, read_source, read_whole_condition
from pytest_cudaenv.requirements.requirement import Requirement, unmet

ASKED = {
    "torch.cuda.device_count() < 2": Requirement(devices=2),
    "torch.cuda.device_count() <= 2": Requirement(devices=3),
    "2 > torch.cuda.device_count()": Requirement(devices=2),
    "not torch.cuda.is_available()": Requirement(devices=1),
    "not torch.cuda.is_available() or torch.cuda.device_count() < 4": Requirement(devices=4),
    "torch.cuda.device_count() < 2 or not HAS_SOMETHING": Requirement(devices=2),
    "torch.cuda.get_device_capability() < (9, 0)": Requirement(devices=1, capability=(">=9.0",)),
    "torch.cuda.get_device_capability(0) <= (8, 9)": Requirement(devices=1, capability=(">8.9",)),
    "torch.cuda.get_device_capability()[0] < 8": Requirement(devices=1, capability=(">=8.0",)),
    "torch.cuda.get_device_capability('cuda')[0] <= 8": Requirement(devices=1, capability=(">=9.0",)),
    "torch.cuda.get_device_properties(0).major < 9": Requirement(devices=1, capability=(">=9.0",)),
    "torch.cuda.get_device_properties(0).total_memory < 40 * 1024**3": Requirement(
        devices=1, memory=40 * 1024**3, exclusive=True
    ),
    "torch.cuda.get_device_properties('cuda:0').total_memory < (40 << 30)": Requirement(
        devices=1, memory=40 << 30, exclusive=True
    ),
    "cuda_device_count_stateless() < 2": Requirement(devices=2),
    "not current_platform.has_device_capability(89)": Requirement(devices=1, capability=(">=8.9",)),
    "not current_platform.is_cuda()": Requirement(devices=1),
}


@pytest.mark.parametrize("text", ASKED)
def test_a_sum_with_a_part_that_nobody_understands_is_no_whole(text: str) -> None:
    whole = read_whole_condition(text)
    assert whole == (None if "HAS_SOMETHING" in text else ASKED[text])


def test_the_words_beside_a_condition() -> None:
    source = read_source(
        textwrap.dedent(
            """
            import pytest, torch, unittest
            HAS = torch.cuda.is_available()
            WHY = "named"
            def two(): return torch.cuda.device_count() >= 2
            pytestmark = pytest.mark.skipif(not HAS, reason=WHY)
            @unittest.skipUnless(two(), "second argument")
            class Case: pass
            @pytest.mark.skipif(not HAS or FAST, reason="a sum")
            def test_sum(): pass
            @pytest.mark.skipif(not HAS, reason=f"{1} made")
            def test_made(): pass
            """
        )
    )
    told = {s.reason: s.is_whole for skips in (source.module, *source.classes.values()) for s in skips}
    assert told == {"named": True, "second argument": True}
    assert [(s.reason, s.is_whole) for skips in source.functions.values() for s in skips] == [
        ("a sum", False),
        (None, True),
    ]


LEFT_ALONE = [
    "torch.cuda.device_count() > 1",
    "torch.cuda.device_count() == 1",
    "torch.cuda.device_count() != 2",
    "torch.cuda.is_available()",
    "not torch.cuda.is_available() and FAST",
    "torch.cuda.get_device_capability() != (9, 0)",
    "torch.cuda.get_device_capability(3) < (9, 0)",
    "torch.cuda.get_device_capability()[1] < 9",
    "device_count < 2",
    "HAS_SOMETHING",
    "not is_available()",
    "device_count() < 2",
    "torch.xpu.device_count() < 2",
    "torch.cuda.device_count() < N",
    "1 < torch.cuda.device_count() < 4",
    "import os",
    "",
    "(" * 300,
]


@pytest.mark.parametrize(("condition", "asked"), ASKED.items())
def test_conditions_that_are_understood(condition: str, asked: Requirement) -> None:
    assert read_condition(condition) == asked
    assert read_condition(f"not ({condition})", skips_if=False) == asked


@pytest.mark.parametrize("condition", LEFT_ALONE)
def test_conditions_that_are_left_alone(condition: str) -> None:
    assert read_condition(condition) is None


# Soundness: where a condition lets a test run, the host meets what it was taken to ask for --------------------

ATOMS = st.one_of(
    st.builds(
        "{}torch.cuda.device_count() {} {}".format,
        st.sampled_from(["", "not "]),
        st.sampled_from(["<", "<=", ">", ">=", "==", "!="]),
        st.integers(0, 5),
    ),
    st.builds("{} {} torch.cuda.device_count()".format, st.integers(0, 5), st.sampled_from(["<", "<=", ">", ">="])),
    st.sampled_from(["torch.cuda.is_available()", "not torch.cuda.is_available()", "A", "B", "not A"]),
    st.builds(
        "torch.cuda.get_device_capability() {} ({}, {})".format,
        st.sampled_from(["<", "<=", ">", ">=", "=="]),
        st.integers(6, 12),
        st.integers(0, 9),
    ),
    st.builds(
        "torch.cuda.get_device_capability()[{}] {} {}".format,
        st.sampled_from([0, 1]),
        st.sampled_from(["<", "<=", ">", ">="]),
        st.integers(0, 12),
    ),
    st.builds(
        "torch.cuda.get_device_properties(0).total_memory {} {} * 1024**3".format,
        st.sampled_from(["<", "<=", ">", ">="]),
        st.integers(1, 200),
    ),
)
EXPRESSIONS = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.builds("({} or {})".format, inner, inner),
        st.builds("({} and {})".format, inner, inner),
        st.builds("(not {})".format, inner),
    ),
    max_leaves=6,
)
HOSTS = st.builds(lambda key, count: f"{key}:{count}", st.sampled_from(sorted(CATALOG)), st.integers(1, 4))
SOFTWARE = Software({"torch": "2.13.0"}, frozenset(), TorchBuild("2.13.0", cuda="13.0"))


def torch_on(host: Host) -> SimpleNamespace:
    device = host.devices[0]
    properties = SimpleNamespace(total_memory=device.total_memory)
    cuda = SimpleNamespace(
        is_available=lambda: True,
        device_count=lambda: len(host.devices),
        get_device_capability=lambda: device.capability,
        get_device_properties=lambda _: properties,
    )
    return SimpleNamespace(cuda=cuda)


@given(EXPRESSIONS, HOSTS, st.booleans(), st.booleans())
def test_whoever_is_let_through_is_met(expression: str, name: str, first: bool, second: bool) -> None:
    host = simulated_host(name, SOFTWARE)
    skips = eval(expression, {"torch": torch_on(host), "A": first, "B": second})
    for wanted, holds in ((True, skips), (False, not skips)):
        requirement = needs(ast.parse(expression, mode="eval").body, wanted, {})
        if holds and requirement is not None:
            lacking = [r.code for r in unmet(requirement, host, read_mask(None, None, host.devices))]
            assert not [code for code in lacking if code.startswith("cuda-")]


# Files ---------------------------------------------------------------------------------------------------------


def read(text: str) -> Source:
    return read_source(textwrap.dedent(text))


def test_names_that_a_module_binds_once_are_followed() -> None:
    source = read("""
        CAPABILITY = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
        COUNT = torch.cuda.device_count()
        NEEDED = 2
        requires_two = pytest.mark.skipif(COUNT < NEEDED, reason="two")

        def has_gpu():
            "Whether there is one."
            return torch.cuda.is_available()

        @requires_two
        def test_two(): pass

        @pytest.mark.skipif(CAPABILITY < (9, 0), reason="Hopper")
        def test_hopper(): pass

        @unittest.skipUnless(has_gpu(), "a GPU")
        def test_gpu(): pass
    """)
    asked = {name: skips[0].requirement for (name, _), skips in source.functions.items()}
    assert asked == {
        "test_two": Requirement(devices=2),
        "test_hopper": Requirement(devices=1, capability=(">=9.0",)),
        "test_gpu": Requirement(devices=1),
    }


def test_names_that_are_imported_are_followed() -> None:
    source = read("""
        from torch.cuda import device_count as count

        @pytest.mark.skipif(count() < 2, reason="two")
        def test_two(): pass
    """)
    ((skip,),) = source.functions.values()
    assert skip.requirement == Requirement(devices=2)


def test_a_name_that_is_bound_twice_tells_nothing() -> None:
    source = read("""
        COUNT = torch.cuda.device_count()
        if FAST:
            COUNT = 8
        @pytest.mark.skipif(COUNT < 2, reason="two")
        def test_two(): pass
    """)
    ((skip,),) = source.functions.values()
    assert skip.requirement is None


def test_classes_modules_and_methods() -> None:
    source = read("""
        pytestmark = [pytest.mark.slow, pytest.mark.skipif(not torch.cuda.is_available(), reason="x")]

        @unittest.skipIf(torch.cuda.device_count() < 2, "two")
        class Outer:
            class Inner:
                @pytest.mark.skipif("torch.cuda.device_count() < 4")
                def test_four(self): pass
    """)
    assert [s.requirement for s in source.module] == [Requirement(devices=1)]
    assert [s.requirement for s in source.classes["Outer"]] == [Requirement(devices=2)]
    ((skip,),) = source.functions.values()
    assert skip.requirement == Requirement(devices=4)


@pytest.mark.parametrize(
    ("test", "always"),
    [
        ('@unittest.skip("no")\ndef test_x(): pass', True),
        ('@pytest.mark.skip(reason="no")\ndef test_x(): pass', True),
        ("@pytest.mark.skip\ndef test_x(): pass", True),
        ('@unittest.skipIf(True, "no")\ndef test_x(): pass', True),
        ('@unittest.skipUnless(False, "no")\ndef test_x(): pass', True),
        ('def test_x():\n    "Says."\n    pytest.skip("no")', True),
        ('def test_x(self):\n    self.skipTest("no")', True),
        ('@unittest.skipIf(False, "no")\ndef test_x(): pass', False),
        ('@unittest.skipIf(X, "no")\ndef test_x(): pass', False),
        ('def test_x():\n    if X:\n        pytest.skip("no")', False),
    ],
)
def test_skips_without_condition(test: str, always: bool) -> None:
    skips = [skip for found in read_source(test).functions.values() for skip in found]
    assert any(skip.always for skip in skips) == always


@pytest.mark.parametrize(
    ("body", "mistakes"),
    [
        ('unittest.skip("no FA")\nreturn', ["unittest.skip(…) as a statement skips nothing"]),
        ("try: f()\nexcept Exception as e: pytest.skip(str(e))", ["except Exception: any defect becomes a skip"]),
        ("try: f()\nexcept: self.skipTest('x')", ["except: any defect becomes a skip"]),
        ("try: f()\nexcept ImportError: pytest.skip('x')", []),
        ("try: f()\nexcept Exception as e:\n    if 'OOM' in str(e): pytest.skip('x')\n    raise", []),
        ("pytest.skip('x')", []),
    ],
)
def test_skips_that_are_mistakes(body: str, mistakes: list[str]) -> None:
    source = read_source("def test_x(self):\n" + textwrap.indent(body, "    "))
    assert [what for _, what in source.mistakes] == mistakes


@given(st.text(max_size=200))
def test_any_text_can_be_read(text: str) -> None:
    assert isinstance(read_source(text), Source)
    read_condition(text)
