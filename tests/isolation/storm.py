"""A storm: workers, zygotes (or keepers) and device processes of one run, killed with -9 at random moments.

python -m tests.isolation.storm 200 [SEED]
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from pytest_cudaenv.grants.lease_table import LeaseTable
from pytest_cudaenv.host.catalog import simulated_host

SUITE = """
    import pytest, time
    from pytest_cudaenv import requires_cuda
    @pytest.fixture(scope="module")
    def model(cuda_devices): return len(cuda_devices)
    @pytest.mark.parametrize("x", range({count}))
    def test_one(model, x): time.sleep(0.1)
    @requires_cuda(devices=2)
    @pytest.mark.parametrize("x", range({count} // 4))
    def test_two(model, x): time.sleep(0.1)
    @pytest.mark.parametrize("x", range({count} // 4))
    def test_cpu(x): time.sleep(0.02)
"""

RECORDER = """
    import json
    def pytest_runtest_logreport(report):
        if not hasattr(report, "node"): return  # in a worker
        text = report.longreprtext
        of_another = "between tests" in text or "at the end of its device process" in text
        kind = "worker" if " crashed while running " in text else "other" if of_another else "test"
        with open("reports.jsonl", "a") as file:
            file.write(json.dumps([report.nodeid, report.when, report.outcome, kind]) + "\\n")
    def pytest_xdist_node_collection_finished(node, ids):
        with open("ids.json", "w") as file: json.dump(ids, file)
    """

Process = tuple[int, str]
"""A process id, and when the process started: ids are used again."""


@dataclass
class Outcome:
    """What a storm left behind."""

    kills: Counter[str] = field(default_factory=Counter)
    tests: int = 0
    lost: list[str] = field(default_factory=list)
    """Tests without an outcome."""
    twice: list[str] = field(default_factory=list)
    """Tests with two outcomes, besides what xdist says of a worker's death and this plugin of one between tests."""
    stuck: list[str] = field(default_factory=list)
    """Devices that cannot be leased."""
    left: set[Process] = field(default_factory=set)
    """Processes that go on."""
    seconds: float = 0.0
    output: str = ""


def _stat(pid: int) -> tuple[int, str] | None:
    """(the parent's id, when it started); None where the process has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else (int(fields[1]), fields[19])


def children() -> dict[int, list[Process]]:
    """The processes of this machine, by their parent."""
    found: dict[int, list[Process]] = {}
    for path in Path("/proc").glob("[0-9]*"):
        if (stat := _stat(int(path.name))) is not None:
            found.setdefault(stat[0], []).append((int(path.name), stat[1]))
    return found


def storm(folder: Path, kills: int, seed: int, workers: int = 4) -> Outcome:
    """One run in `folder`, with that many kills."""
    chance, outcome = random.Random(seed), Outcome()
    (folder / "conftest.py").write_text(textwrap.dedent(RECORDER))
    for number in range(8):
        (folder / f"test_{number}.py").write_text(textwrap.dedent(SUITE.format(count=4 + kills)))
    leases = folder / "leases"
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("CUDAENV_", "PYTEST_"))}
    environ |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "CUDAENV_LEASE_DIR": str(leases)}
    options = ["-n", str(workers), "--max-worker-restart", "100000", "--cuda-simulate", "h100:4"]
    command = [sys.executable, "-m", "pytest", "-q", "--tb=no", "-p", "cudaenv", "-p", "xdist", *options]
    started = time.monotonic()
    with (folder / "output.txt").open("w") as output:
        run = subprocess.Popen(command, cwd=folder, env=environ, stdout=output, stderr=subprocess.STDOUT)
        seen = _kill(run, kills, chance, outcome)
        run.wait(timeout=600)
    outcome.seconds = time.monotonic() - started
    outcome.output = (folder / "output.txt").read_text()
    if (folder / "ids.json").exists() and (folder / "reports.jsonl").exists():
        _count_reports(folder, outcome)
    for _ in range(100):
        outcome.left = {(pid, start) for pid, start in seen if (stat := _stat(pid)) is not None and stat[1] == start}
        if not outcome.left:
            break
        time.sleep(0.1)
    uuids = [device.uuid for device in simulated_host("h100:4").devices]
    table = LeaseTable(leases, run="after the storm")
    for uuid in uuids:
        try:
            table.acquire([uuid], 1, timeout=5).release()
        except Exception as error:
            outcome.stuck.append(f"{uuid}: {error}")
    return outcome


def _kill(run: subprocess.Popen[bytes], kills: int, chance: random.Random, outcome: Outcome) -> set[Process]:
    """Kill until it is enough, or the run has ended; every process of the run that was seen."""
    seen: set[Process] = set()
    running: set[Process] = set()
    while run.poll() is None:
        time.sleep(chance.uniform(0.05, 0.25))
        tree = children()
        found: dict[str, list[Process]] = {"worker": [], "zygote": [], "device process": []}
        for worker in tree.get(run.pid, []):
            zygotes = [zygote for zygote in tree.get(worker[0], []) if tree.get(zygote[0])]
            found["zygote"] += zygotes
            found["device process"] += [process for zygote in zygotes for process in tree[zygote[0]]]
            if zygotes:
                running.add(worker)
            if worker in running:  # xdist itself fails where it sends the first tests to the dead
                found["worker"].append(worker)
        seen.update(process for processes in found.values() for process in processes)
        if outcome.kills.total() >= kills:
            continue
        kind = chance.choices(list(found), [2, 1, 7])[0]
        spared = [one for one in found if found[one] and one not in outcome.kills]
        if spared and 2 * outcome.kills.total() >= kills:
            kind = spared[0]  # a small storm is to hit all kinds as well
        if not found[kind]:
            continue
        victim = chance.choice(found[kind])
        try:
            os.kill(victim[0], signal.SIGKILL)
            outcome.kills[kind] += 1
        except ProcessLookupError:
            pass
    return seen


def _count_reports(folder: Path, outcome: Outcome) -> None:
    ids = json.loads((folder / "ids.json").read_text())
    reports = [json.loads(line) for line in (folder / "reports.jsonl").read_text().splitlines()]
    ends: dict[str, list[str]] = {nodeid: [] for nodeid in ids}
    for nodeid, when, result, kind in reports:
        if (when == "call" or result != "passed") and kind == "test":
            ends[nodeid].append(f"{when} {result}")
    crashed = {nodeid for nodeid, _, _, kind in reports if kind == "worker"}
    outcome.tests = len(ids)
    outcome.lost = [nodeid for nodeid, found in ends.items() if not found and nodeid not in crashed]
    # One outcome of the body; and where it passed, its teardown may have failed by a death.
    outcome.twice = [
        f"{nodeid}: {found}"
        for nodeid, found in ends.items()
        if len([f for f in found if not f.startswith("teardown")]) > 1 or len(found) > 2
    ]


def main(kills: int, seed: int) -> None:
    """Print what one storm left behind."""
    with tempfile.TemporaryDirectory() as temporary:
        outcome = storm(Path(temporary), kills, seed)
    print(f"{outcome.kills.total()} kills {dict(outcome.kills)} in {outcome.seconds:.0f} s, {outcome.tests} tests:")
    print(f"lost {len(outcome.lost)}, twice {len(outcome.twice)}, stuck {outcome.stuck}, left {outcome.left}")
    print(*outcome.lost[:10], *outcome.twice[:10], outcome.output[-600:], sep="\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)
