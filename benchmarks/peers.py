"""A second virtual environment with the plugins that isolate tests, on the newest pytest on which all of them work.

pytest-forked fails every test on pytest 9.2, pytest-isolate as well. What else is imported (torch, transformers, this
plugin) comes from the environment that makes it, so that both run the same code.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]

PACKAGES = (
    "pytest==9.1.1",
    "pytest-forked==1.7.5",
    "pytest-isolate==0.0.17",
    "pytest-isolated==0.6.0",
    "pytest-insubprocess==1.2",
)


@dataclass(frozen=True)
class Mode:
    """A way to run tests apart from each other."""

    name: str
    plugin: str
    """The one plugin that is loaded besides pytest's own."""
    options: tuple[str, ...]
    is_ours: bool = False
    is_start: bool = False
    """Whether each test is a start of pytest: then whole runs are compared, as reports may come all at once."""


def ours(name: str, level: str) -> Mode:
    """A level of this plugin's isolation."""
    options = ("--cuda-simulate", "h100", "--cuda-isolation", level)
    return Mode(name, "pytest_cudaenv.plugin", options, is_ours=True)


OFF, REUSED, FRESH = (
    ours("in the pytest process", "off"),
    ours("a device process that lives", "session"),
    ours("a device process of its own", "function"),
)

FORKED = Mode("pytest-forked", "pytest_forked", ("--forked",))

MODES = (
    OFF,
    REUSED,
    FRESH,
    FORKED,
    Mode("pytest-isolate", "pytest_isolate.plugin", ("--isolate",)),
    Mode("pytest-isolated", "pytest_isolated.plugin", ("--isolated",), is_start=True),
    Mode("pytest-insubprocess", "pytest_insubprocess", ("--insubprocess",), is_start=True),
)


def environment(folder: Path) -> Path:
    """The interpreter of the peers' environment, which is made in `folder` where it is not there yet."""
    python = folder / "bin" / "python"
    made = folder / "made.txt"
    if not made.exists() or made.read_text().split() != list(PACKAGES):
        venv.create(folder, with_pip=True, clear=True)
        command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *PACKAGES]
        subprocess.run(command, check=True)
        # After its own, so that what is pinned comes first.
        site = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
        shared = [str(REPOSITORY), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
        (site / "zz_shared.pth").write_text("".join(f"{path}\n" for path in dict.fromkeys(shared)))
        made.write_text("\n".join(PACKAGES))
    return python


def base() -> str:
    """This environment, in words."""
    return f"Python {sys.version.split()[0]}, {', '.join(PACKAGES)}"
