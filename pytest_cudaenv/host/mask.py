"""`CUDA_VISIBLE_DEVICES` and `CUDA_DEVICE_ORDER`, read and written as the CUDA driver reads them.

The rules were measured with one fresh process per value, calling `cuInit`, `cuDeviceGetCount` and
`cuDeviceGetUuid` (`tests/data/*.jsonl`, `benchmarks/driver_masks.py`). NVIDIA documents only a part of them:
https://docs.nvidia.com/cuda/cuda-programming-guide/05-appendices/environment-variables.html
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from pytest_cudaenv.host.devices import CudaDevice, renumbered

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
DEVICE_ORDER = "CUDA_DEVICE_ORDER"

HIDDEN = "-1"
"""The mask that hides every device on every platform; the empty string does not on Windows."""

SUCCESS, NO_DEVICE, INVALID_DEVICE = 0, 100, 101
"""What `cuInit` returns: CUDA_SUCCESS, CUDA_ERROR_NO_DEVICE, CUDA_ERROR_INVALID_DEVICE."""

ORDERS = ("FASTEST_FIRST", "PCI_BUS_ID")
"""The values of `CUDA_DEVICE_ORDER` that the driver accepts; every other, empty too, makes `cuInit` fail."""

_INTEGER = re.compile(r"[ \t\n\v\f\r]*([+-]?)([0-9]+)(.*)", re.DOTALL)

_WORDS_FOR_NONE = {"", HIDDEN, "NoDevFiles", "none", "void"}
"""Masks that somebody writes to hide every device, rather than by mistake. `NoDevFiles` is Slurm's."""


@dataclass(frozen=True)
class MaskReading:
    """What a CUDA process sees under a mask."""

    cu_init: int
    """`cuInit`'s return code: 0, 100 (no device) or 101 (invalid device: every CUDA call fails)."""
    devices: tuple[CudaDevice, ...]
    """The visible devices, numbered as CUDA numbers them; empty unless `cu_init` is 0."""
    hidden: tuple[CudaDevice, ...] = ()
    """The devices of this host that the mask hides."""
    deliberate: bool = False
    """Whether an empty result is what the mask's writer meant (`-1`, the empty string, Slurm's word)."""
    notes: tuple[str, ...] = ()
    """What the writer of the mask may not expect, one sentence each."""


def read_environment(
    environ: Mapping[str, str], devices: Sequence[CudaDevice], fastest_first: Sequence[str] | None = None
) -> MaskReading:
    """What a CUDA process started with this environment sees of `devices`; see `read_mask`."""
    return read_mask(environ.get(VISIBLE_DEVICES), environ.get(DEVICE_ORDER), devices, fastest_first)


def read_mask(
    mask: str | None,
    order: str | None,
    devices: Sequence[CudaDevice],
    fastest_first: Sequence[str] | None = None,
) -> MaskReading:
    """What a CUDA process sees of `devices`, given in PCI bus order, under a mask and an order (None: unset).

    `fastest_first` lists the UUIDs in CUDA's default order where it is known to differ from the bus order.
    """
    if order is not None and order not in ORDERS and devices:
        note = f"{DEVICE_ORDER}={order!r} is not a value that CUDA knows; it makes every CUDA call fail"
        return MaskReading(INVALID_DEVICE, (), tuple(devices), notes=(note,))
    ordered = _in_cuda_order(devices, order, fastest_first)
    entries = _enumerated(ordered)
    if mask is None:
        return _seen(entries, devices, ())
    chosen, notes = _resolve(mask, entries, ordered)
    if len({d.uuid for d in chosen}) < len(chosen):
        twice = next(d for i, d in enumerate(chosen) if d.uuid in {e.uuid for e in chosen[:i]})
        note = f"{VISIBLE_DEVICES}={mask} names one device twice ({twice.name}); it makes every CUDA call fail"
        return MaskReading(INVALID_DEVICE, (), tuple(devices), notes=(*notes, note))
    if not chosen:
        return MaskReading(NO_DEVICE, (), tuple(devices), mask.strip() in _WORDS_FOR_NONE, tuple(notes))
    if _kind(mask) == "index" and not _is_order_known(devices, order, fastest_first):
        notes.append(
            f"{VISIBLE_DEVICES}={mask} counts in an order of CUDA's own, which is not known for these GPUs; "
            f"set {DEVICE_ORDER}=PCI_BUS_ID"
        )
    return _seen(chosen, devices, notes)


def models_differ(devices: Sequence[CudaDevice]) -> bool:
    """Whether the GPUs are not all alike: then CUDA's default order need not be that of the PCI bus."""
    # An instance's memory is a part of its GPU's, and its name says how large a part.
    return len({(d.name.split(" MIG ")[0], d.capability, None if d.is_mig else d.total_memory) for d in devices}) > 1


def _is_order_known(devices: Sequence[CudaDevice], order: str | None, fastest_first: Sequence[str] | None) -> bool:
    return order == "PCI_BUS_ID" or fastest_first is not None or not models_differ(devices)


def _seen(chosen: Sequence[CudaDevice], devices: Sequence[CudaDevice], notes: Iterable[str]) -> MaskReading:
    # CUDA enumerates one MIG instance at most, and no whole GPU beside it.
    instances = [d for d in chosen if d.is_mig]
    visible = renumbered(instances[:1] or chosen)
    shown = {d.uuid for d in visible}
    hidden = tuple(d for d in devices if d.uuid not in shown)
    if len(instances) > 1 or (instances and len(chosen) > 1):
        notes = (*notes, "a process sees one MIG instance at most; the other devices are not visible")
    return MaskReading(SUCCESS if visible else NO_DEVICE, visible, hidden, notes=tuple(notes))


def _in_cuda_order(
    devices: Sequence[CudaDevice], order: str | None, fastest_first: Sequence[str] | None
) -> list[CudaDevice]:
    """The devices in the order in which CUDA counts them, before any mask."""
    if order == "PCI_BUS_ID" or not fastest_first:
        return list(devices)
    place = {uuid: i for i, uuid in enumerate(fastest_first)}
    return sorted(devices, key=lambda d: place.get(d.mig_parent or d.uuid, len(place)))


def _enumerated(ordered: Sequence[CudaDevice]) -> list[CudaDevice]:
    """One entry per GPU, as integer tokens count them; a GPU in MIG mode is its first instance."""
    entries: dict[str, CudaDevice] = {}
    for device in ordered:
        entries.setdefault(device.mig_parent or device.uuid, device)
    return list(entries.values())


def _resolve(
    mask: str, entries: Sequence[CudaDevice], every: Sequence[CudaDevice]
) -> tuple[list[CudaDevice], list[str]]:
    """The devices that a mask names, in its order, and what its writer may not expect."""
    chosen: list[CudaDevice] = []
    notes: list[str] = []
    tokens = mask.split(",")
    kind = _kind(mask)
    for place, token in enumerate(tokens):
        device = _match(token, entries, every) if _kind(token) == kind else None
        if device is None:
            rest = tokens[place + 1 :]
            if (token or any(rest)) and mask.strip() not in _WORDS_FOR_NONE:
                notes.append(_stop_note(mask, token, rest, len(entries)))
            break
        if kind == "index" and (ignored := _ignored_part(token)):
            notes.append(_ignored_note(token, ignored))
        chosen.append(device)
    return chosen, notes


def _kind(token: str) -> str:
    """The kind of a token; that of a whole mask is its first token's."""
    return "uuid" if token.startswith(("GPU-", "MIG-")) else "index"


_ULONG = 2**64
"""One more than C's `ULONG_MAX`."""


def _index(token: str) -> int | None:
    """The number that the driver reads at the start of a token; None where there is no digit.

    C's `strtoul`, kept in 32 bits with a sign: it stops at ULONG_MAX, a minus sign counts down from 2**64, and
    4294967296 is 0.
    """
    match = _INTEGER.match(token)
    if match is None:
        return None
    digits = match[2].lstrip("0") or "0"
    # int() refuses more than some thousand digits.
    value = int(digits) if len(digits) <= len(str(_ULONG)) else _ULONG
    value = _ULONG - 1 if value >= _ULONG else (-value if match[1] == "-" else value) % _ULONG
    low = value % 2**32
    return low - 2**32 if low >= 2**31 else low


def _ignored_part(token: str) -> str:
    match = _INTEGER.match(token)
    return match[3].strip() if match else ""


def _ignored_note(token: str, ignored: str) -> str:
    if re.match(r"-[0-9]", ignored):
        what = "it knows no ranges, and the other devices of this one are not visible"
    else:
        what = f"{ignored!r} is ignored"
    return f"{VISIBLE_DEVICES}: CUDA reads the token {token!r} as {_index(token)}; {what}"


def _match(token: str, entries: Sequence[CudaDevice], every: Sequence[CudaDevice]) -> CudaDevice | None:
    """The device that one token names, or None where the token is invalid."""
    kind = _kind(token)
    if kind == "index":
        index = _index(token)
        return entries[index] if index is not None and 0 <= index < len(entries) else None
    if token.startswith("MIG-"):
        return _match_mig(token, every)
    return _only(entries, _gpu_uuid, "GPU-", token)


def _match_mig(token: str, every: Sequence[CudaDevice]) -> CudaDevice | None:
    """A MIG instance by `MIG-<uuid>` or by the older `MIG-GPU-<uuid>/<gi>/<ci>`; a whole GPU by `MIG-<its uuid>`."""
    instances = [d for d in every if d.is_mig]
    if old := re.fullmatch(r"MIG-(GPU-.+)/([0-9]+)/([0-9]+)", token):
        ids = (int(old[2]), int(old[3]))
        found = _only([d for d in instances if d.mig_ids == ids], _gpu_uuid, "GPU-", old[1])
        if found is not None:
            return found
    return _only(every, lambda d: d.uuid, "MIG-", token)


def _gpu_uuid(device: CudaDevice) -> str:
    """The UUID of the device, or of the GPU that it is cut from."""
    return device.mig_parent or device.uuid


def _only(
    devices: Sequence[CudaDevice], uuid_of: Callable[[CudaDevice], str], prefix: str, token: str
) -> CudaDevice | None:
    """The one device whose UUID starts with the token's hexadecimal digits.

    Digits compare without case and dashes are skipped, so that `GPU--` is a prefix of every UUID, where `GPU-` alone
    is none; what stands after a whole UUID is not read.
    """
    if token == prefix:
        return None
    wanted = _digits(token, prefix)
    uuids = [_digits(uuid_of(d), prefix) for d in devices]
    found = [d for d, uuid in zip(devices, uuids, strict=True) if uuid.startswith(wanted[: len(uuid)])]
    return found[0] if len(found) == 1 else None


def _digits(uuid: str, prefix: str) -> str:
    return uuid[len(prefix) :].replace("-", "").lower()


def _stop_note(mask: str, token: str, rest: Sequence[str], count: int) -> str:
    """Why the list ends at this token, with a guess at the mistake."""
    cut = f"; {len(rest)} more after it are not read" if any(rest) else ""
    return f"{VISIBLE_DEVICES}={mask} ends at the token {token!r} ({_guess(mask, token, count)}){cut}"


def _guess(mask: str, token: str, count: int) -> str:
    """What is wrong with a token at which the list ends."""
    index = _index(token)
    if mask.startswith(("[", "(", "'", '"')):
        return "the value holds brackets or quotes"
    if not token.strip():
        return "nothing between two commas"
    if _kind(token) != _kind(mask):
        words = {"index": "numbers", "uuid": "UUIDs"}
        if re.match(r"\s+(GPU|MIG)-", token):
            return "no blank may stand before a UUID"
        return f"the first token decides that this is a list of {words[_kind(mask)]}"
    if token.lower().lstrip().startswith(("gpu-", "mig-")):
        return "a UUID needs the exact prefix GPU- or MIG-, no blanks, and must name one device"
    if index is None:
        return "not a device"
    if index < 0:
        return "a negative number ends the list"
    # Containers number the GPUs that they are given anew: the host's number means nothing there.
    return f"{index} is out of range: CUDA counts {count} here, from 0"


def write_mask(
    granted: Sequence[CudaDevice],
    environ: Mapping[str, str],
    host_devices: Sequence[CudaDevice],
    fastest_first: Sequence[str] | None = None,
) -> dict[str, str]:
    """The environment entries under which a new process sees exactly `granted`, in this order.

    `granted` are devices of the host, at most one of them a MIG instance, and then that alone: no mask shows more.
    Tokens keep the kind of the outer mask in `environ`, so that libraries which read integers go on working.
    Indices come with `CUDA_DEVICE_ORDER=PCI_BUS_ID`. UUIDs are written where an outer index mask was read under
    another order that differs, or may differ, from it; and on a host with MIG, where how CUDA counts was not
    measured. No device: the mask that hides all.
    """
    if not granted:
        return {VISIBLE_DEVICES: HIDDEN}
    if _can_write_indices(environ, host_devices, fastest_first):
        place = {d.uuid: i for i, d in enumerate(host_devices)}
        return {VISIBLE_DEVICES: ",".join(str(place[d.uuid]) for d in granted), DEVICE_ORDER: "PCI_BUS_ID"}
    return {VISIBLE_DEVICES: ",".join(d.uuid for d in granted)}


def _can_write_indices(
    environ: Mapping[str, str], devices: Sequence[CudaDevice], fastest_first: Sequence[str] | None
) -> bool:
    outer, order = environ.get(VISIBLE_DEVICES), environ.get(DEVICE_ORDER)
    if any(d.is_mig for d in devices):
        return False
    if outer is None:
        return True
    ordered = _in_cuda_order(devices, order, fastest_first)
    same_order = [d.uuid for d in ordered] == [d.uuid for d in devices]
    return _kind(outer) == "index" and same_order and _is_order_known(devices, order, fastest_first)
