"""Requirements: how they merge, which devices fit, and every need that a host does not meet, in order."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fabricated_hosts import capable, codes, device, everything, host, reading, software
from hypothesis import given
from hypothesis import strategies as st

from pytest_cudaenv.host.catalog import MiB, simulated_host
from pytest_cudaenv.host.devices import CudaDevice, GiB, Problem
from pytest_cudaenv.requirements.hub_kernels import HubKernel
from pytest_cudaenv.requirements.reason import Rank, Reason, brief, ordered, shortened, unknown
from pytest_cudaenv.requirements.requirement import Requirement, fitting, unmet, with_cell
from pytest_cudaenv.requirements.sizes import parse_memory

NOTHING = Requirement()
ONE = Requirement(devices=1)


def some(*values: object) -> st.SearchStrategy[tuple[object, ...]]:
    return st.lists(st.sampled_from(values), unique=True, max_size=3).map(tuple)


REQUIREMENTS = st.builds(
    Requirement,
    devices=st.integers(0, 8),
    device_if_any=st.booleans(),
    memory=st.integers(0, 80 * GiB),
    capability=some(">=8.0", "<10", "==9.0"),
    driver=some(">=12.4", "<14"),
    exclusive=st.booleans(),
    dtypes=some("bfloat16", "tf32", "float8_e4m3fn"),
    attn_backends=some("eager", "sdpa", "flash_attention_3"),
    # One test has one cell: two different dtypes never meet.
    cell_dtype=st.sampled_from([None, "bfloat16"]),
    hub_kernels=some(HubKernel("a/b"), HubKernel("a/b", version=1), HubKernel("a/c", revision="main")),
    needs_kernels=st.booleans(),
    quantization=some("gptq", "fp8"),
    packages=some("torch>=2", "a | b"),
    nccl=st.booleans(),
    model_reasons=some(Reason("model-attn", "sdpa", "A", "x"), Reason("model-attn", "sdpa", "B", "x")),
)


def in_any_order(requirement: Requirement) -> dict[str, object]:
    values = vars(requirement)
    return {name: frozenset(v) if isinstance(v, tuple) else v for name, v in values.items()}


@given(REQUIREMENTS, REQUIREMENTS, REQUIREMENTS)
def test_merging_is_associative(a: Requirement, b: Requirement, c: Requirement) -> None:
    assert a.merged(b).merged(c) == a.merged(b.merged(c))


@given(REQUIREMENTS)
def test_merging_is_idempotent_and_nothing_is_neutral(a: Requirement) -> None:
    assert a.merged(a) == a
    assert a.merged(NOTHING) == NOTHING.merged(a) == a


@given(REQUIREMENTS, REQUIREMENTS)
def test_merging_is_commutative_up_to_order(a: Requirement, b: Requirement) -> None:
    assert in_any_order(a.merged(b)) == in_any_order(b.merged(a))


@given(REQUIREMENTS, REQUIREMENTS)
def test_merging_never_lowers_a_need(a: Requirement, b: Requirement) -> None:
    found = host("h100", "h100", "a10g", "t4", software=everything())
    both = a.merged(b)
    assert both.device_count >= max(a.device_count, b.device_count)
    if fitting(both, found, found.devices) is not None:
        assert all(fitting(r, found, found.devices) is not None for r in (a, b) if r.device_count)


def test_the_larger_count_and_memory_and_every_specifier() -> None:
    of_class = Requirement(devices=2, memory=10 * GiB, capability=(">=8.0",))
    of_function = Requirement(devices=1, memory=30 * GiB, capability=("<10",))
    assert of_class.merged(of_function) == Requirement(devices=2, memory=30 * GiB, capability=(">=8.0", "<10"))


def test_no_requirement_is_met_everywhere() -> None:
    for found in (host(), host("h100"), host(problem=Problem("nvml-mismatch", "x", "y"))):
        assert unmet(NOTHING, found, reading(found)) == ()
        assert fitting(NOTHING, found, found.devices) is None


def test_the_first_devices_that_fit_are_taken() -> None:
    found = host("t4", "h100", "a10g", "h100")
    needed = Requirement(devices=2, capability=(">=9.0",))
    assert [d.index for d in fitting(needed, found, found.devices) or ()] == [1, 3]
    assert unmet(needed, found, reading(found)) == ()
    assert fitting(Requirement(devices=3, capability=(">=9.0",)), found, found.devices) is None


def test_what_the_closest_device_lacks_is_told() -> None:
    found = host("t4", "h100", "a10g")
    needed = Requirement(devices=2, capability=(">=8.0",), memory=40 * GiB)
    assert [str(r) for r in unmet(needed, found, reading(found))] == [
        "[cuda-memory] needs 40.0 GiB of memory; have 22.5 GiB (A10G)"
    ]


@pytest.mark.parametrize(
    ("have", "needed", "mask", "expected"),
    [
        ([], ONE, None, "[cuda-none] needs a CUDA device; have none"),
        (["h100"], Requirement(devices=2), None, "[cuda-devices] needs 2 CUDA devices; have 1"),
        (
            ["h100"] * 4,
            Requirement(devices=4),
            "0,1",
            "[cuda-devices] needs 4 CUDA devices; have 2 visible of 4",
        ),
        (["h100"] * 2, ONE, "-1", "[cuda-hidden] needs a CUDA device; have 2 hidden by CUDA_VISIBLE_DEVICES"),
        (["h100"] * 2, ONE, "NoDevFiles", "[cuda-hidden] needs a CUDA device; have 2 hidden by CUDA_VISIBLE_DEVICES"),
        (["h100"] * 2, ONE, "7", "[cuda-mask] needs a CUDA device; have 2 hidden by a mistaken mask"),
    ],
)
def test_counts_and_masks(have: list[str], needed: Requirement, mask: str | None, expected: str) -> None:
    found = host(*have)
    assert [str(r) for r in unmet(needed, found, reading(found, mask))] == [expected]


def test_a_mistaken_mask_does_not_turn_a_gpu_test_into_a_cpu_test() -> None:
    found = host("h100")
    if_any = Requirement(device_if_any=True)
    assert unmet(if_any, found, reading(found, "-1")) == ()
    [reason] = unmet(if_any, found, reading(found, "[0"))
    assert (reason.code, reason.is_error) == ("cuda-mask", True)


def mig(index: int) -> CudaDevice:
    return replace(
        device("a100"),
        uuid=f"MIG-{index}1111111-2222-3333-4444-555555555555",
        name="NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        total_memory=4864 * MiB,
        mig_parent="GPU-1",
        mig_ids=(index, 0),
    )


def test_mig_shows_one_instance() -> None:
    found = host(mig(1), mig(2))
    seen = replace(reading(found), devices=found.devices[:1], hidden=found.devices[1:])
    assert unmet(ONE, found, seen) == ()
    assert codes(unmet(Requirement(devices=2), found, seen)) == ["cuda-mig"]


def test_mem_1_what_a_card_is_sold_as_counts() -> None:
    found = host("a10g")
    for size, expected in [("24GB", []), ("22 GiB", []), ("24GiB", []), ("25GiB", ["cuda-memory"])]:
        needed = Requirement(devices=1, memory=parse_memory(size))
        assert codes(unmet(needed, found, reading(found))) == expected, size


@pytest.mark.parametrize(
    ("key", "size"), [("h100", "80GB"), ("b200", "180GB"), ("h200", "141GB"), ("l4", "24GB"), ("t4", "16GB")]
)
def test_mem_2_each_card_has_its_own_number(key: str, size: str) -> None:
    found = host(key)
    assert unmet(Requirement(devices=1, memory=parse_memory(size)), found, reading(found)) == ()


def test_unknown_memory_is_an_error_and_never_zero() -> None:
    found = host(replace(device("h100"), total_memory=None))
    [reason] = unmet(Requirement(devices=1, memory=GiB), found, reading(found))
    assert (reason.code, reason.is_error) == ("cuda-unknown", True)
    assert unmet(ONE, found, reading(found)) == ()


@pytest.mark.parametrize(
    ("specifier", "fits"),
    [(">=8.6", True), ("==8.6", True), (">=8.10", False), ("<8.9", True), ("~=8.0", True), ("!=8.6", False)],
)
def test_capability_specifiers(specifier: str, fits: bool) -> None:
    found = host("a10g")
    expected = [] if fits else ["cuda-capability"]
    assert codes(unmet(Requirement(devices=1, capability=(specifier,)), found, reading(found))) == expected


def test_driver_specifiers() -> None:
    found = host("a10g", software=software(torch="2.6.0+cu124"), driver_cuda=(12, 4))
    for specifier, expected in [(">=12.4", []), (">=12.10", ["cuda-driver"]), (">=13", ["cuda-driver"])]:
        assert codes(unmet(Requirement(devices=1, driver=(specifier,)), found, reading(found))) == expected


def test_a_problem_is_an_error_and_never_no_gpu() -> None:
    problem = Problem("nvml-mismatch", "driver/library mismatch", "Reboot.")
    found = host(problem=problem)
    for needed in (ONE, Requirement(device_if_any=True)):
        reasons = unmet(needed, found, reading(found))
        assert codes(reasons) == ["nvml-mismatch"]
        assert reasons[0].is_error
        assert reasons[0].remedy == "Reboot."


def test_every_unmet_need_is_told_what_can_be_mended_first() -> None:
    found = host("t4", software=everything())
    needed = Requirement(
        devices=1,
        memory=20 * GiB,
        dtypes=("bfloat16",),
        attn_backends=("flash_attention_3",),
        packages=("absent>=1",),
        quantization=("fbgemm_fp8",),
    )
    reasons = unmet(needed, found, reading(found), lambda target: "ImportError: x" if "flash" in target else None)
    assert codes(reasons) == [
        "attn-broken",
        "package-missing",
        "quant-package",
        "quant-package",
        "cuda-memory",
        "dtype-native",
        "attn-capability",
        "quant-capability",
    ]
    assert [r.rank for r in reasons] == sorted(r.rank for r in reasons)


def test_a_cell_runs_on_the_cpu_where_no_device_is() -> None:
    found = host(software=software(torch="2.13.0+cpu"))
    for backend, dtype, expected in [
        ("eager", "float32", []),
        ("sdpa", "bfloat16", []),
        ("flash_attention_2", "bfloat16", ["attn-missing", "attn-device"]),
        ("flex_attention", "float32", ["attn-device"]),
    ]:
        needed = with_cell(NOTHING, [backend], dtype)
        assert codes(unmet(needed, found, reading(found))) == expected


def test_a_cell_on_a_simulated_host_with_an_assumed_package() -> None:
    cell = with_cell(NOTHING, ["flash_attention_3"], "bfloat16")
    assumed = software({"torch": "2.13.0"}, torch="2.13.0+cpu").assuming({"flash-attn-3": "3.0.0"})
    for key, expected in [("h100:2", []), ("a100", ["attn-capability"]), ("b200", ["attn-capability"])]:
        found = simulated_host(key, assumed)
        assert codes(unmet(cell, found, reading(found))) == expected


def test_reasons_are_told_once_and_in_order() -> None:
    late = Reason("a", "b", "c", "d")
    early = Reason("e", "f", "g", "h", Rank.BROKEN)
    assert ordered([late, early, late]) == (early, late)
    assert str(late) == "[a] b; have c"
    assert not late.is_error


def test_long_lines_are_cut_where_it_hurts_least() -> None:
    reason = brief("code", "needs a thing", "x" * 90, "remedy")
    assert len(f"{reason.need}; have {reason.have}") == 60
    assert reason.need == "needs a thing"
    reason = brief("code", "needs " + "y" * 90, "z" * 90, "remedy")
    assert len(f"{reason.need}; have {reason.have}") == 60
    assert reason.have == "z" * 11 + "…"
    assert brief("code", "needs\na", "b\n c", "r").need == "needs a"
    assert shortened("exactly", 7) == "exactly"
    assert unknown("needs x", "y").is_error


def test_unknown_capability_under_a_specifier() -> None:
    found = host(capable(None))
    [reason] = unmet(Requirement(devices=1, capability=(">=8.0",)), found, reading(found))
    assert (reason.code, reason.is_error) == ("cuda-unknown", True)
