"""`python -m benchmarks`: every benchmark that runs on any machine. `driver_masks` needs NVIDIA devices."""

from __future__ import annotations

from benchmarks import collection, isolation, startup

for benchmark in (startup, collection, isolation):
    benchmark.main()
