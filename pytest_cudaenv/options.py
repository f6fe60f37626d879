"""The options and their twins: `--cuda-unmet`, `CUDAENV_UNMET`, ini `cuda_unmet`.

Only declared here, as every start of pytest pays for it; `settings` resolves them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest


class Option(NamedTuple):
    """One setting and its three spellings: `--cuda-unmet`, `CUDAENV_UNMET`, ini `cuda_unmet`."""

    name: str
    help: str
    metavar: str
    default: Any = None
    choices: tuple[str, ...] = ()
    repeated: bool = False
    is_switch: bool = False
    """`--cuda-strict`, `CUDAENV_STRICT=1`, ini `cuda_strict = true`."""

    @property
    def flag(self) -> str:
        return f"--cuda-{self.name}"

    @property
    def variable(self) -> str:
        return f"CUDAENV_{self.name.replace('-', '_').upper()}"

    @property
    def dest(self) -> str:
        return f"cuda_{self.name.replace('-', '_')}"


OPTIONS = (
    Option(
        "visible",
        "show the run only these of the devices that it could see, as CUDA_VISIBLE_DEVICES would (indices or UUIDs)",
        "MASK",
    ),
    Option(
        "unmet",
        "what becomes of a test whose requirements this host does not meet (default: skip)",
        "{skip,deselect,fail}",
        default="skip",
        choices=("skip", "deselect", "fail"),
    ),
    Option(
        "unmarked",
        "what becomes of tests that declare no device: they run as they are, and those that used CUDA are named (keep, "
        "the default), they see no device (hide), are granted one where the host has one (grant), or fail if they "
        "used CUDA (fail)",
        "{keep,hide,grant,fail}",
        default="keep",
        choices=("keep", "hide", "grant", "fail"),
    ),
    Option(
        "isolation",
        "run device tests in device processes: one while its grant fits the next test (session, the default), per "
        "module, per test (function), or in the pytest process (off)",
        "{session,module,function,off}",
        default="session",
        choices=("session", "module", "function", "off"),
    ),
    Option(
        "wait",
        "how long a device test waits for devices that other runs hold, before it is an error (default: 600)",
        "SECONDS",
        default="600",
    ),
    Option(
        "adopt",
        "read the needs of tests that were written without this plugin: require_* of transformers and accelerate, and "
        "conditions and reasons of skipif; repeat for more",
        "{transformers,accelerate,skipif}",
        default=(),
        choices=("transformers", "accelerate", "skipif"),
        repeated=True,
    ),
    Option(
        "default-memory",
        "what device tests without memory= use on each device, 8GB: they share devices instead of taking them whole",
        "SIZE",
    ),
    Option(
        "lease-dir",
        "folder of the locks on devices, shared by all runs that share them (containers: mount one)",
        "PATH",
    ),
    Option(
        "simulate",
        "decide everything as on that host, h100 or h100:2; with --collect-only: what would run there?",
        "NAME[:COUNT]",
    ),
    Option(
        "ledger",
        "write what each test needed, whether it ran and on what, as JSON lines (docs/ledger.md)",
        "PATH",
    ),
    Option(
        "plan",
        "with --collect-only: write what each collected test needs, as JSON lines",
        "PATH",
    ),
    Option(
        "require",
        "what this runner promises, and may neither lack nor skip: devices>=2, capability>=9.0, memory>=80GB, bf16, "
        "flash_attention_3, hub_kernels, peft>=0.18; repeat for more",
        "NEED",
        default=(),
        repeated=True,
    ),
    Option("runner", "promise what this profile of the ini key cuda_runners says, and name it in the ledger", "NAME"),
    Option("min-ran", "fail the run where fewer tests than that have run on a CUDA device", "N"),
    Option(
        "strict",
        "fail device tests that passed without using CUDA",
        "",
        default=False,
        is_switch=True,
    ),
    Option(
        "update-expectations",
        "write into golden files (expectations/<module>.json) what they do not expect on this device",
        "",
        default=False,
        is_switch=True,
    ),
    Option(
        "assume",
        "take this distribution as installed and working; repeat for more",
        "DIST[==VERSION]",
        default=(),
        repeated=True,
    ),
    Option(
        "attn-backends",
        "run only cells of this attention backend; repeat for more",
        "BACKEND",
        default=(),
        repeated=True,
    ),
    Option(
        "hub-kernels",
        "of tests with the fixture hub_kernels run only those with kernels on, or off; both and auto (the default) run "
        "every one. In the ini file, both generates each of them with kernels off and on",
        "{auto,on,off,both}",
        default="auto",
        choices=("auto", "on", "off", "both"),
    ),
    Option("dtypes", "run only cells of this dtype; repeat for more", "DTYPE", default=(), repeated=True),
)

_INI_HELP = {
    "attn-backends": "attention backends of tests that name none (the same on every host: they make the ids)",
    "dtypes": "dtypes of tests that name none (the same on every host: they make the ids)",
}

RUNNERS = "cuda_runners"
"""The ini key of the profiles that `--cuda-runner` and `pytest-cudaenv matrix` read."""

ADOPT_MARKERS = "cuda_adopt_markers"
"""The ini key that says what a project's own markers ask for."""

SWITCH = "cuda"
"""The ini key that switches the whole plugin off: `cuda = false`."""


def add_options(parser: pytest.Parser) -> None:
    """Declare every option and its ini twin."""
    group = parser.getgroup("cudaenv", "CUDA devices, attention backends and dtypes (pytest-cudaenv)")
    for option in OPTIONS:
        group.addoption(
            option.flag,
            dest=option.dest,
            help=option.help,
            # None, so that an option at its default can be told from one that was given.
            default=None,
            **_action(option),
        )
        help_text = _INI_HELP.get(option.name, f"default of {option.flag}")
        kind: Any = "args" if option.repeated else "string"
        parser.addini(option.dest, help_text, type=kind, default=None)
    parser.addini(
        RUNNERS, "profiles of runners, NAME: devices=h100:2 package=peft requires=bf16 cost=8", type="linelist"
    )
    adopt_markers = (
        "what the project's own markers ask for, one a line: distributed(num_gpus=n) = requires_cuda(devices=n)"
    )
    parser.addini(ADOPT_MARKERS, adopt_markers, type="linelist", default=None)
    parser.addini(SWITCH, "false switches pytest-cudaenv off, whatever else is set", type="bool", default=True)


def _action(option: Option) -> dict[str, Any]:
    if option.is_switch:
        return {"action": "store_true"}
    return {"action": "append" if option.repeated else "store", "metavar": option.metavar}


def given(config: pytest.Config, option: Option) -> Any:
    """The value from the command line, also before pytest has finished reading it; None where it is not there."""
    value: Any = config.getoption(option.dest, None)
    return getattr(config.known_args_namespace, option.dest, None) if value is None else value


def any_given(config: pytest.Config, environ: Mapping[str, str] | None = None) -> bool:
    """Whether the run was told anything: an option, a variable, or a `cuda_…` ini key. Cheap; validates nothing."""
    environ = os.environ if environ is None else environ
    return bool(config.getini(ADOPT_MARKERS)) or any(
        given(config, o) is not None or environ.get(o.variable, "").strip() or config.getini(o.dest) for o in OPTIONS
    )
