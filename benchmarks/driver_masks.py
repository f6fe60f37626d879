"""What the driver answers for values of CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER, beside the rule's own answer.

One fresh process per value. Run it on a host with NVIDIA devices:

    python -m benchmarks.driver_masks > benchmarks/results/driver_masks.jsonl

Rows are those of `tests/data/cuda_visible_devices_driver.jsonl`, with `agrees` for the rule in `host/mask.py`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence

from pytest_cudaenv.host.detect import detect_host
from pytest_cudaenv.host.devices import CudaDevice
from pytest_cudaenv.host.driver import ask_driver
from pytest_cudaenv.host.mask import DEVICE_ORDER, VISIBLE_DEVICES, read_mask


def masks(devices: Sequence[CudaDevice]) -> Iterator[str | None]:
    """Values that probe the rule where the documentation says nothing."""
    first, last = devices[0].uuid, devices[-1].uuid
    digits = first[4:].replace("-", "")
    # Numbers: blanks, signs, bases, digits that are none in C, and where 32 and 64 bits end.
    yield from (
        None,
        "",
        "0",
        "+0",
        "+1",
        "00",
        "01",
        "\t0",
        "\n0",
        "\v0",
        "\f0",
        "\r0",
        "\u00a00",
        "0\t1",
        "0 1",
        "1e0",
    )
    yield from ("--0", "+-0", "- 0", "0.9", "0x", "x0", "\u0660", "\uff10", "0\u00b2")
    yield from (str(2**31), str(2**32 - 2), str(2**32), str(2**32 + 1), f"-{2**32}", f"-{2**32 - 1}", str(2**63))
    yield from (str(2**64 - 2), str(2**64 - 1), str(2**64), str(2**64 + 1), f"-{2**64 - 1}", f"-{2**64}", "9" * 23)
    # Lists: where they end, and what counts as twice.
    yield from ("0,+1", "0,-0", "0,00", "0,\t1", "0,1,", "0,1,,", "0,1 ,", "1,0,-1", "0,0x0", "0,1,1", "1,1", "0,1,2,0")
    yield from (
        "0,2,0",
        "0,0,2",
        f"0,{2**32}",
        f"{2**32 + 1},0",
        f"1,{2**32 + 1}",
        f"0,{first}",
        f"0,{first[4:]}",
        f"{first},1",
    )
    # UUIDs: prefixes, what stands after one, dashes, case, and the two spellings.
    yield from ("GPU-", "GPU--", "GPU", "GPU-0", "GPU-*", "gpu-", f"{first} ", f"{first}z", f"{first}0", f"{first}\t")
    yield from (
        f"{first[:12]} ",
        f"{first[:12]}z",
        f"{first[:13]}zz",
        first[:5],
        first[:13],
        first[:39],
        f"{first[:39]}z",
    )
    yield from (
        f"{first[:39]} ",
        first.replace("-", "")[:20],
        f"GPU-{digits}",
        f"GPU-{digits[:10]}",
        f"GPU-{digits[:31]}",
    )
    yield from (
        f"GPU-{digits}z",
        f"GPU-{digits[:31]}z",
        f"GPU-{first[4:8]}-",
        f"GPU-{first[4:8]}--",
        f"GPU--{first[4:8]}",
    )
    yield from (
        f"GPU-{'-'.join(digits[:6])}",
        f"GPU-{first}",
        first[:3].lower() + first[3:],
        first[:4] + first[4:].upper(),
    )
    yield from (f"{first},{last}", f"{last},{first}", f"{first[:8]},{last}", f"{first[:8]},{first}", f"{first}z,{last}")
    yield from (f"0,{last}", f"{first},,{last}", f"{first}, {last}", f"{first},{last},{first}", first[4:])
    yield from (
        "MIG-",
        "MIG-0",
        "MIG-zz",
        "MIG-GPU-0/0/0",
        f"MIG-{first}",
        f"MIG-{first[:12]}",
        f"MIG-{first}/0",
        f"MIG-{first}/0/0",
    )
    yield from (
        f"MIG-{first[4:]}",
        f"MIG-{first[4:].upper()}",
        f"MIG-{first[4:12]}",
        f"mig-{first[4:]}",
        f"0,MIG-{first[4:]}",
    )
    yield from (
        f"{first},MIG-{first[4:]}",
        f"MIG-{first[4:]},{first}",
        f"MIG-{first[4:12]},{last}",
        f"{last},MIG-{first[4:12]}",
    )


ORDERS = (
    None,
    "",
    " ",
    "PCI_BUS_ID",
    "FASTEST_FIRST",
    "PCI_BUS_ID ",
    " PCI_BUS_ID",
    "pci_bus_id",
    "Fastest_First",
    "0",
    "PCI",
    "PCI_BUS_ID\n",
    "FASTEST_FIRST,PCI_BUS_ID",
)


def main() -> int:
    """Print one row per value; the exit status is the number of disagreements, at most 100."""
    host = detect_host({})
    uuids = [d.uuid for d in host.devices]
    print(json.dumps({"driver": host.driver, "devices": [d.name for d in host.devices], "uuids": uuids}))
    values = [(mask, None) for mask in masks(host.devices)] + [(m, o) for o in ORDERS for m in (None, "0")]
    wrong = 0
    for mask, order in values:
        environ = {k: v for k, v in os.environ.items() if k not in (VISIBLE_DEVICES, DEVICE_ORDER)}
        environ |= {VISIBLE_DEVICES: mask} if mask is not None else {}
        environ |= {DEVICE_ORDER: order} if order is not None else {}
        answer = ask_driver(environ)
        seen = [uuids.index(d.uuid) for d in answer.devices]
        rule = read_mask(mask, order, host.devices, host.fastest_first)
        agrees = (rule.cu_init, [uuids.index(d.uuid) for d in rule.devices]) == (answer.cu_init, seen)
        wrong += not agrees
        row = {"mask": mask, "order": order, "cu_init": answer.cu_init, "visible": seen, "agrees": agrees}
        print(json.dumps(row), flush=True)
    return min(wrong, 100)


if __name__ == "__main__":
    sys.exit(main())
