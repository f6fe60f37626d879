"""Warming the Hub cache, in an interpreter of its own: `python -m …kernel_cache '[["org/name", 1, null]]'`.

It prints what became of each as a line of JSON: null, or why not. No kernel is imported.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def warm(repo: str, version: int | None, revision: str | None) -> None:
    """Download a kernel's build for this host, and what it depends on, so that it loads offline, by version too.

    Downloading by version stores no ref of it, without which that version does not load offline (kernels 0.17.2).
    """
    from kernels import install_kernel

    at = {"version": version} if version is not None else {"revision": revision}
    variant = Path(install_kernel(repo, **at))
    snapshot = variant.parents[1]
    if version is not None and snapshot.parent.name == "snapshots":
        ref = snapshot.parents[1] / "refs" / f"v{version}"
        ref.parent.mkdir(exist_ok=True)
        ref.write_text(snapshot.name, encoding="utf-8")
    metadata = json.loads((variant / "metadata.json").read_text(encoding="utf-8"))
    for other in metadata.get("kernel-depends", ()):
        warm(other["repo-id"], other.get("version"), other.get("revision"))


def main(argument: str) -> None:
    for repo, version, revision in json.loads(argument):
        why = None
        try:
            warm(repo, version, revision)
        except Exception as error:  # each of them is the kernel's own matter
            from pytest_cudaenv.verdict.kernel_errors import diagnose

            why = str(diagnose(error))
        print(json.dumps(why), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
