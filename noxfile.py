"""The plugin's own tests on each release of pytest that it supports, alone and on two workers.

    nox                  # everything: each release twice
    nox -s short         # the oldest release, in a minute or two

An environment has its own pytest, and takes everything else from the environment that runs nox: torch is not
installed once more for each.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

import nox

PYTEST = ("8.4.2", "9.0.2", "9.1.1", "newest")
"""The last of each series; `newest` is whatever the index has."""

SHORT = (
    "tests/isolation/test_handover.py",
    "tests/isolation/test_device_processes.py",
    "tests/plugin/test_fixtures.py",
)

nox.options.default_venv_backend = "venv"
nox.options.reuse_existing_virtualenvs = True
nox.options.sessions = ["tests"]


def prepare(session: nox.Session, pytest: str) -> None:
    """An environment with this pytest, before all else that is installed here."""
    session.install("pytest" if pytest == "newest" else f"pytest=={pytest}")
    if pytest == "newest":
        session.install("--upgrade", "pytest")
    session.install("--no-deps", "-e", str(Path(__file__).parent))  # for the console script
    site = Path(session.virtualenv.location).glob("lib/python*/site-packages")
    shared = dict.fromkeys((str(Path(__file__).parent), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")))
    for folder in site:
        (folder / "zz_shared.pth").write_text("".join(f"{path}\n" for path in shared))


def run(session: nox.Session, pytest: str, *arguments: str) -> None:
    prepare(session, pytest)
    session.run("python", "-m", "pytest", "--version")
    # Many short runs of pytest: without byte code each would compile the package again.
    session.run("python", "-m", "pytest", "-q", *arguments, env={"PYTHONDONTWRITEBYTECODE": ""})


@nox.session
@nox.parametrize("workers", [0, 2])
@nox.parametrize("pytest", PYTEST)
def tests(session: nox.Session, pytest: str, workers: int) -> None:
    """Every test."""
    run(session, pytest, "-n", str(workers), *(session.posargs or ["tests"]))


@nox.session
def short(session: nox.Session) -> None:
    """What a release of pytest is likeliest to break, on the oldest one, on two workers."""
    run(session, PYTEST[0], "-n", "2", *(session.posargs or SHORT))
