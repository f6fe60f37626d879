"""The grammar of CUDA_VISIBLE_DEVICES: against the measured driver, against named cases, and as properties."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_cudaenv.host.catalog import simulated_device, simulated_host
from pytest_cudaenv.host.devices import CudaDevice, renumbered
from pytest_cudaenv.host.mask import (
    DEVICE_ORDER,
    HIDDEN,
    INVALID_DEVICE,
    NO_DEVICE,
    SUCCESS,
    VISIBLE_DEVICES,
    models_differ,
    read_environment,
    read_mask,
    write_mask,
)

DATA = Path(__file__).parents[1] / "data"
DISPUTED = {(None, "")}
"""The first table has the empty CUDA_DEVICE_ORDER as accepted, with no device visible, which no return code of CUDA
means. Measured again, on the same driver, `cuInit` returns 101 for it: so the second table says, and the rule."""


def measured(name: str) -> list[Any]:
    """(devices, row) for each row of a table."""
    header, *rows = [json.loads(line) for line in (DATA / name).read_text(encoding="utf-8").splitlines()]
    devices = renumbered(replace(simulated_device("h200", i), uuid=uuid) for i, uuid in enumerate(header["uuids"]))
    return [
        pytest.param(devices, row, id=json.dumps([row["mask"], row["order"]]))
        for row in rows
        if name != "cuda_visible_devices_driver.jsonl" or (row["mask"], row["order"]) not in DISPUTED
    ]


FOUR = simulated_host("h100:4").devices
SIXTEEN = simulated_host("t4:16").devices


def uuids(devices: Sequence[CudaDevice]) -> list[str]:
    return [d.uuid for d in devices]


def visible(mask: str | None, devices: Sequence[CudaDevice] = FOUR, order: str | None = None) -> list[int]:
    """Places, in `devices`, of what a mask shows."""
    return [uuids(devices).index(d.uuid) for d in read_mask(mask, order, devices).devices]


def mig_host(*instances_per_gpu: int) -> tuple[CudaDevice, ...]:
    """A host of A100s: 0 stands for a whole GPU, n for one that is cut into n instances."""
    devices: list[CudaDevice] = []
    for index, count in enumerate(instances_per_gpu):
        gpu = simulated_device("a100", index)
        cut = [
            replace(
                gpu, uuid=f"MIG-{index:x}{i:x}5a5a5a-0000-4000-8000-0000000000aa", mig_parent=gpu.uuid, mig_ids=(i, 0)
            )
            for i in range(count)
        ]
        devices += cut or [gpu]
    return renumbered(devices)


@pytest.mark.parametrize(
    ("devices", "row"),
    measured("cuda_visible_devices_driver.jsonl")
    + measured("cuda_visible_devices_more.jsonl")
    + measured("cuda_visible_devices_one.jsonl"),
)
def test_measured_driver(devices: tuple[CudaDevice, ...], row: dict[str, Any]) -> None:
    """Each row was one fresh process on one or two H200s; the tables' first lines say more."""
    reading = read_mask(row["mask"], row["order"], devices)
    assert reading.cu_init == row["cu_init"]
    assert uuids(reading.devices) == [devices[i].uuid for i in row["visible"]]
    assert [d.index for d in reading.devices] == list(range(len(row["visible"])))
    assert set(uuids(reading.hidden)) == set(uuids(devices)) - set(uuids(reading.devices))


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        pytest.param("1gpu2,2ampere", [1, 2], id="CVD-5-digits-then-text"),
        pytest.param("0-3", [0], id="CVD-5-range"),
        pytest.param("0x1", [0], id="CVD-5-hexadecimal"),
        pytest.param("16", [], id="CVD-6-out-of-range"),
        pytest.param("0,2,-1,1", [0, 2], id="CVD-7-nvidias-example"),
        pytest.param("[0, 1, 2, 3]", [], id="CVD-10-list"),
        pytest.param('"0,1"', [], id="CVD-10-quotes"),
        pytest.param(" 0 ,1", [0, 1], id="CVD-12-blanks"),
        pytest.param("0,", [0], id="CVD-13-trailing-comma"),
        pytest.param(",0", [], id="CVD-13-leading-comma"),
        pytest.param("3,2,1,0", [3, 2, 1, 0], id="CVD-14-order"),
        pytest.param("2,3", [2, 3], id="ENV-4"),
        pytest.param("+1", [1], id="sign"),
        pytest.param("\t\n\v\f\r 1", [1], id="every-blank-of-C"),
        pytest.param("\u00a01", [], id="blank-that-is-none-in-C"),
        pytest.param("\u0661", [], id="digit-that-is-none-in-C"),
        pytest.param("0" * 5000 + "1", [1], id="more-digits-than-int-reads"),
        pytest.param("9" * 5000, [], id="beyond-every-integer"),
        pytest.param("-" + "9" * 5000, [], id="below-every-integer"),
    ],
)
def test_indices(mask: str, expected: list[int]) -> None:
    assert visible(mask) == expected


def test_two_digit_indices() -> None:
    # CVD-11
    assert visible("10,11", SIXTEEN) == [10, 11]


def test_uuid_prefix_must_name_one_gpu() -> None:
    # CVD-1, CVD-2
    twins = renumbered(replace(d, uuid=f"GPU-aaaa{d.index}111-2222") for d in FOUR)
    assert visible(twins[2].uuid, twins) == [2]
    assert visible("GPU-aaaa2", twins) == [2]
    assert visible("GPU-AAAA2", twins) == [2]
    assert visible("GPU-aaaa", twins) == []
    assert visible("GPU-aaaa2,GPU-aaaa0", twins) == [2, 0]


@pytest.mark.parametrize("mask", ["NoDevFiles", "none", "void", "-1", "", " "])
def test_mask_that_hides_on_purpose(mask: str) -> None:
    # CVD-4, CVD-7, CVD-8
    reading = read_mask(mask, None, FOUR)
    assert (reading.cu_init, reading.devices, reading.deliberate) == (NO_DEVICE, (), True)
    assert reading.notes == ()
    assert uuids(reading.hidden) == uuids(FOUR)


@pytest.mark.parametrize("mask", ["all", "9", "[0]", ",0", "GPU-zz", "-1,0"])
def test_mask_that_hides_by_mistake_is_quoted(mask: str) -> None:
    # CVD-4, ENV-1
    reading = read_mask(mask, None, FOUR)
    assert (reading.cu_init, reading.devices, reading.deliberate) == (NO_DEVICE, (), False)
    assert reading.notes[0].startswith(f"CUDA_VISIBLE_DEVICES={mask} ends at the token ")


def test_host_without_devices_hides_nothing() -> None:
    for mask, deliberate in ((None, False), ("0", False), ("-1", True)):
        reading = read_mask(mask, None, ())
        assert (reading.cu_init, reading.devices, reading.hidden) == (NO_DEVICE, (), ())
        assert reading.deliberate is deliberate


@pytest.mark.parametrize(
    ("mask", "note"),
    [
        pytest.param("0-3", "CUDA reads the token '0-3' as 0; it knows no ranges", id="CVD-5-range"),
        pytest.param("1gpu", "CUDA reads the token '1gpu' as 1; 'gpu' is ignored", id="CVD-5-text"),
        pytest.param("0,7", "(7 is out of range: CUDA counts 4 here, from 0)", id="ENV-3"),
        pytest.param("0,-1,1", "'-1' (a negative number ends the list); 1 more after it are not read", id="CVD-7"),
        pytest.param("[0, 1]", "'[0' (the value holds brackets or quotes); 1 more", id="CVD-10"),
        pytest.param("0,,1", "'' (nothing between two commas); 1 more", id="CVD-13"),
        pytest.param(" GPU-0", "(a UUID needs the exact prefix GPU- or MIG-, no blanks", id="CVD-12-first"),
        pytest.param("GPU-0,\tGPU-1", "(no blank may stand before a UUID)", id="CVD-12-later"),
        pytest.param("gpu-0", "(a UUID needs the exact prefix", id="case-of-prefix"),
        pytest.param("GPU-0,1", "'1' (the first token decides that this is a list of UUIDs)", id="index-after-uuid"),
        pytest.param(
            "0,GPU-1", "'GPU-1' (the first token decides that this is a list of numbers)", id="uuid-after-index"
        ),
        pytest.param("GPU-0,MIG-9", "(a UUID needs the exact prefix GPU- or MIG-, no blanks", id="mig-after-uuid"),
        pytest.param("zero", "'zero' (not a device)", id="word"),
    ],
)
def test_notes_name_the_mistake(mask: str, note: str) -> None:
    (found,) = read_mask(mask, None, FOUR).notes
    assert note in found
    assert not found.endswith(".")


@pytest.mark.parametrize("mask", [None, "0", "0,", "3,2", "GPU-0", "-1", ""])
def test_mask_that_does_what_it_says_has_no_note(mask: str | None) -> None:
    assert read_mask(mask, None, FOUR).notes == ()


@pytest.mark.parametrize("mask", ["0,0", "0,1,0", "0, 0", "0,+0", "00,0x7", "GPU-0,GPU-0", "GPU-1,GPU-1b"])
def test_device_named_twice_breaks_cuda(mask: str) -> None:
    # CVD-6: it is no empty list, every call fails.
    devices = renumbered([FOUR[0], replace(FOUR[1], uuid="GPU-1b"), *FOUR[2:]])
    reading = read_mask(mask, None, devices)
    assert (reading.cu_init, reading.devices, reading.deliberate) == (INVALID_DEVICE, (), False)
    assert "names one device twice (NVIDIA H100 80GB HBM3)" in reading.notes[-1]


def test_duplicate_after_the_end_of_the_list_counts_for_nothing() -> None:
    assert visible("0,9,0") == [0]


@pytest.mark.parametrize("order", ["pci_bus_id", "PCI_BUS_ID ", "fastest", "0", ""])
def test_misspelled_order_breaks_cuda(order: str) -> None:
    for mask in (None, "0", "-1"):
        reading = read_mask(mask, order, FOUR)
        assert (reading.cu_init, reading.devices) == (INVALID_DEVICE, ())
        assert f"CUDA_DEVICE_ORDER={order!r} is not a value" in reading.notes[0]


class TestMixedHost:
    """ORD-1, ORD-4: the slow card comes first on the bus, the fast one first in CUDA."""

    DEVICES = renumbered([simulated_device("t4", 1), simulated_device("h100", 2), simulated_device("a100", 3)])
    FASTEST_FIRST = (DEVICES[1].uuid, DEVICES[2].uuid, DEVICES[0].uuid)

    @pytest.mark.parametrize("order", [None, "FASTEST_FIRST"])
    def test_indices_count_in_cudas_order(self, order: str | None) -> None:
        for mask, expected in ((None, [1, 2, 0]), ("0", [1]), ("2,0", [0, 1]), ("GPU-1", [0])):
            reading = read_mask(mask, order, self.DEVICES, self.FASTEST_FIRST)
            assert uuids(reading.devices) == [self.DEVICES[i].uuid for i in expected]

    def test_pci_bus_order_is_as_asked(self) -> None:
        reading = read_mask("0,2", "PCI_BUS_ID", self.DEVICES, self.FASTEST_FIRST)
        assert uuids(reading.devices) == [self.DEVICES[0].uuid, self.DEVICES[2].uuid]

    def test_unknown_order_is_said(self) -> None:
        for order in (None, "FASTEST_FIRST"):
            (note,) = read_mask("0", order, self.DEVICES).notes
            assert note.endswith("set CUDA_DEVICE_ORDER=PCI_BUS_ID")
        assert read_mask("0", "PCI_BUS_ID", self.DEVICES).notes == ()
        assert read_mask("GPU-1", None, self.DEVICES).notes == ()
        assert read_mask("0", None, self.DEVICES, self.FASTEST_FIRST).notes == ()

    @pytest.mark.parametrize(
        ("environ", "written"),
        [
            ({}, {VISIBLE_DEVICES: "1", DEVICE_ORDER: "PCI_BUS_ID"}),
            ({VISIBLE_DEVICES: "0,1", DEVICE_ORDER: "PCI_BUS_ID"}, {VISIBLE_DEVICES: "1", DEVICE_ORDER: "PCI_BUS_ID"}),
            ({VISIBLE_DEVICES: "0,1"}, {VISIBLE_DEVICES: DEVICES[1].uuid}),
            ({VISIBLE_DEVICES: "GPU-2"}, {VISIBLE_DEVICES: DEVICES[1].uuid}),
        ],
        ids=["unset", "index-in-bus-order", "index-in-another-order", "uuid"],
    )
    def test_written_mask(self, environ: dict[str, str], written: dict[str, str]) -> None:
        # ORD-2
        assert write_mask([self.DEVICES[1]], environ, self.DEVICES, self.FASTEST_FIRST) == written

    def test_unknown_order_writes_uuids(self) -> None:
        environ = {VISIBLE_DEVICES: "0"}
        assert write_mask([self.DEVICES[1]], environ, self.DEVICES) == {VISIBLE_DEVICES: self.DEVICES[1].uuid}

    def test_models(self) -> None:
        assert models_differ(self.DEVICES)
        assert models_differ([FOUR[0], replace(FOUR[1], total_memory=40 * 1024**3)])
        assert not models_differ(FOUR)
        assert not models_differ(mig_host(2, 3))
        assert not models_differ(())


class TestMig:
    DEVICES = mig_host(3, 0, 2)

    def test_process_sees_one_instance(self) -> None:
        # MIG-2
        for mask in (None, ",".join(d.uuid for d in self.DEVICES if d.is_mig)):
            reading = read_mask(mask, None, self.DEVICES)
            assert uuids(reading.devices) == [self.DEVICES[0].uuid]
            assert uuids(reading.hidden) == uuids(self.DEVICES[1:])
            assert "one MIG instance at most" in reading.notes[-1]

    def test_both_notations(self) -> None:
        # MIG-1, MIG-5
        second = self.DEVICES[1]
        parent = second.mig_parent or ""
        for mask in (second.uuid, second.uuid[:8], f"MIG-{parent}/1/0", f"MIG-{parent.upper()}/1/0"):
            reading = read_mask(mask, None, self.DEVICES)
            assert (reading.cu_init, uuids(reading.devices)) == (SUCCESS, [second.uuid]), mask
        for mask in (f"MIG-{parent}/1/1", f"MIG-{parent}", "MIG-GPU-", f"MIG-{parent}/1", f"GPU-{second.uuid[4:]}"):
            assert read_mask(mask, None, self.DEVICES).devices == (), mask

    def test_old_driver_spells_uuids_the_old_way(self) -> None:
        device = replace(self.DEVICES[0], uuid=f"MIG-{self.DEVICES[0].mig_parent}/7/0", mig_ids=None)
        assert uuids(read_mask(device.uuid, None, [device]).devices) == [device.uuid]

    def test_index_of_a_gpu_is_its_first_instance(self) -> None:
        assert visible("0", self.DEVICES) == [0]
        assert visible("1", self.DEVICES) == [3]
        assert visible("2", self.DEVICES) == [4]
        assert visible("3", self.DEVICES) == []

    def test_masks_are_uuids(self) -> None:
        for environ in ({}, {VISIBLE_DEVICES: "0"}, {VISIBLE_DEVICES: self.DEVICES[0].uuid}):
            assert write_mask([self.DEVICES[2]], environ, self.DEVICES) == {VISIBLE_DEVICES: self.DEVICES[2].uuid}
        # How CUDA counts whole GPUs beside GPUs in MIG mode was not measured.
        assert write_mask([self.DEVICES[3]], {}, self.DEVICES) == {VISIBLE_DEVICES: self.DEVICES[3].uuid}


def test_written_mask_keeps_the_kind_of_the_outer_one() -> None:
    # CVD-3, ENV-2: libraries that read integers go on working.
    granted = [FOUR[3], FOUR[1]]
    index = {VISIBLE_DEVICES: "3,1", DEVICE_ORDER: "PCI_BUS_ID"}
    uuid = {VISIBLE_DEVICES: f"{FOUR[3].uuid},{FOUR[1].uuid}"}
    assert write_mask(granted, {}, FOUR) == index
    assert write_mask(granted, {VISIBLE_DEVICES: "1,2,3"}, FOUR) == index
    assert write_mask(granted, {VISIBLE_DEVICES: "1,2,3", DEVICE_ORDER: "FASTEST_FIRST"}, FOUR) == index
    assert write_mask(granted, {VISIBLE_DEVICES: "GPU-1,GPU-3"}, FOUR) == uuid


def test_nothing_granted_is_hidden_on_every_platform() -> None:
    # CVD-8: the empty string is no value on Windows.
    assert write_mask([], {VISIBLE_DEVICES: "GPU-1"}, FOUR) == {VISIBLE_DEVICES: HIDDEN} == {VISIBLE_DEVICES: "-1"}


# Properties

blanks = st.text(" \t\n\v\f\r", max_size=2)
signs = st.sampled_from(["", "+"])
rests = st.from_regex(r"([^0-9,\x00][^,\x00]*)?", fullmatch=True)


@given(st.lists(st.tuples(blanks, signs, st.integers(0, 15), rests), min_size=1, unique_by=lambda t: t[2]))
def test_integer_tokens_are_read_like_strtol(tokens: list[tuple[str, str, int, str]]) -> None:
    mask = ",".join(f"{blank}{sign}{number}{rest}" for blank, sign, number, rest in tokens)
    assert visible(mask, SIXTEEN) == [number for _, _, number, _ in tokens]


@given(st.text(st.characters(exclude_characters="\x00", exclude_categories=["Cs"]), max_size=30))
def test_every_text_is_read(mask: str) -> None:
    reading = read_mask(mask, None, FOUR)
    assert reading.cu_init in {SUCCESS, NO_DEVICE, INVALID_DEVICE}
    assert bool(reading.devices) == (reading.cu_init == SUCCESS)
    assert sorted(uuids(reading.devices) + uuids(reading.hidden)) == sorted(uuids(FOUR))
    if not re.match(r"[ \t\n\v\f\r]*[+-]?[0-9]|GPU-|MIG-", mask):
        assert reading.cu_init == NO_DEVICE


valid_tokens = st.one_of(
    st.integers(0, 3).map(str),
    st.integers(0, 3).map(lambda i: FOUR[i].uuid),
    st.integers(0, 3).map(lambda i: f"GPU-{i}"),
)


@given(st.lists(valid_tokens, min_size=1, max_size=8))
def test_first_token_decides_the_kind(tokens: list[str]) -> None:
    is_uuid = tokens[0].startswith("GPU-")
    counted = list(itertools.takewhile(lambda t: t.startswith("GPU-") == is_uuid, tokens))
    places = [int(t[4] if is_uuid else t) for t in counted]
    reading = read_mask(",".join(tokens), None, FOUR)
    if len(set(places)) < len(places):
        assert reading.cu_init == INVALID_DEVICE
    else:
        assert uuids(reading.devices) == [FOUR[i].uuid for i in places]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=6), st.sampled_from(["", "9", "-1", "x", "GPU-0"]), st.data())
def test_nothing_after_an_invalid_token_counts(places: list[int], invalid: str, data: st.DataObject) -> None:
    tail = data.draw(st.lists(st.integers(0, 3).map(str), max_size=3))
    before = read_mask(",".join(map(str, places)), None, FOUR)
    after = read_mask(",".join([*map(str, places), invalid, *tail]), None, FOUR)
    assert (after.cu_init, uuids(after.devices)) == (before.cu_init, uuids(before.devices))


hosts = st.one_of(
    st.integers(1, 16).map(lambda n: simulated_host(f"h100:{n}").devices),
    st.lists(st.sampled_from(["t4", "a100", "h100"]), min_size=1, max_size=6).map(
        lambda keys: renumbered(simulated_device(key, i) for i, key in enumerate(keys))
    ),
)
"""Hosts of whole GPUs, alike and mixed."""


@st.composite
def outer_masks(draw: st.DrawFn, devices: Sequence[CudaDevice]) -> str | None:
    places = draw(st.permutations(range(len(devices))))[: draw(st.integers(1, len(devices)))]
    kind = draw(st.sampled_from(["unset", "index", "uuid"]))
    if kind == "unset":
        return None
    return ",".join(str(i) if kind == "index" else devices[i].uuid for i in places)


@given(hosts, st.sampled_from([None, "FASTEST_FIRST", "PCI_BUS_ID"]), st.booleans(), st.data())
def test_a_written_mask_shows_exactly_what_was_granted(
    devices: tuple[CudaDevice, ...], order: str | None, order_is_known: bool, data: st.DataObject
) -> None:
    fastest_first = tuple(data.draw(st.permutations(uuids(devices))))
    mask = data.draw(outer_masks(devices))
    environ = {k: v for k, v in ((VISIBLE_DEVICES, mask), (DEVICE_ORDER, order)) if v is not None}
    # Alike GPUs have one order; of a mixed host, it may be unknown to this process, and never to CUDA.
    truth = fastest_first if models_differ(devices) else None
    known = truth if order_is_known else None
    outer = read_environment(environ, devices, known)
    assert outer.cu_init == SUCCESS
    wanted = data.draw(st.permutations(outer.devices))
    granted = wanted[: data.draw(st.integers(0, len(wanted)))]
    written = write_mask(granted, environ, devices, known)

    inner = read_environment({**environ, **written}, devices, truth)
    assert uuids(inner.devices) == uuids(granted)
    assert inner.cu_init == (SUCCESS if granted else NO_DEVICE)
    assert [d.index for d in inner.devices] == list(range(len(granted)))
    assert set(written) <= {VISIBLE_DEVICES, DEVICE_ORDER}
    assert " " not in written[VISIBLE_DEVICES]

    tokens = written[VISIBLE_DEVICES].split(",")
    is_uuid = {t.startswith("GPU-") for t in tokens}
    if granted and mask is not None and mask.startswith("GPU-"):
        assert is_uuid == {True}
    if granted and (mask is None or (mask[0].isdigit() and (truth is None or order == "PCI_BUS_ID"))):
        assert is_uuid == {False}
        assert written[DEVICE_ORDER] == "PCI_BUS_ID"
    # Every token stands on its own: a mask written inside this one names the same devices.
    for device, token in zip(granted, tokens, strict=False):
        alone = read_environment({**environ, **written, VISIBLE_DEVICES: token}, devices, truth)
        assert uuids(alone.devices) == [device.uuid]


@given(st.lists(st.integers(0, 4), min_size=1, max_size=4), st.data())
def test_a_written_mask_shows_the_granted_instance(instances_per_gpu: list[int], data: st.DataObject) -> None:
    devices = mig_host(*instances_per_gpu)
    device = data.draw(st.sampled_from(devices))
    outer = data.draw(st.sampled_from([None, "0", device.uuid]))
    environ = {} if outer is None else {VISIBLE_DEVICES: outer}
    inner = read_environment({**environ, **write_mask([device], environ, devices)}, devices)
    assert (inner.cu_init, uuids(inner.devices)) == (SUCCESS, [device.uuid])


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("outer", [None, "3,1,0,2", ",".join(d.uuid for d in FOUR)])
def test_every_subset_in_every_order(count: int, outer: str | None) -> None:
    environ = {} if outer is None else {VISIBLE_DEVICES: outer}
    for granted in itertools.permutations(FOUR, count):
        inner = read_environment({**environ, **write_mask(granted, environ, FOUR)}, FOUR)
        assert uuids(inner.devices) == uuids(granted)
