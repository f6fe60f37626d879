"""`python -m benchmarks [NAME ...]`: every benchmark that runs on any machine in a minute or two, or those named.

`scheduling`, `merge`, `ledger`, `verdict` and `mutations` take minutes to half an hour, `hub_kernels` needs
transformers and kernels, and `driver_masks` NVIDIA devices: they run when they are named.
"""

from __future__ import annotations

import importlib
import itertools
import sys

# What follows the names are options of their own: `ledger --tests 2000`.
names = list(itertools.takewhile(lambda argument: not argument.startswith("-"), sys.argv[1:]))
for name in names or ("startup", "collection", "isolation"):
    importlib.import_module(f"benchmarks.{name}").main()
