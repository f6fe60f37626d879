"""The line to paste: one command that runs a failed test again as it ran, from the folder where the run was started."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

from pytest_cudaenv import compat
from pytest_cudaenv.options import OPTIONS, given
from pytest_cudaenv.runner import seed_of
from pytest_cudaenv.session import PLAN

if TYPE_CHECKING:
    from pytest_cudaenv.session import CudaSession

DROPPED = {
    # Which tests run, in which order, where, and how often: the line names one.
    "deselect", "lf", "failedfirst", "newfirst", "stepwise", "stepwise_skip", "stepwise_reset", "cacheclear",
    "last_failed_no_failures", "maxfail", "pyargs", "numprocesses", "maxprocesses", "dist", "distload", "tx", "px",
    "loadgroup", "rsyncdir", "rsyncignore", "looponfail", "maxworkerrestart", "testrunuid", "maxschedchunk",
    "no_loadscope_reorder", "reruns", "reruns_delay", "force_reruns", "only_rerun", "rerun_except", "max_suite_reruns",
    "session_timeout", "randomly_seed", "cuda_visible", "cuda_isolation",
    "cuda_update_expectations",
    # What is printed and written.
    "verbose", "reportchars", "tbstyle", "color", "code_highlight", "showlocals", "showcapture", "fulltrace",
    "durations", "durations_min", "no_header", "no_summary", "max_warnings", "disable_warnings", "pastebin",
    "xmlpath", "junitprefix", "xfail_tb", "fold_skipped", "force_short_summary", "htmlpath", "self_contained_html",
    "report_log", "json_report_file", "log_file", "basetemp", "usepdb", "trace", "setupshow", "cov_report",
    "cov_source", "cov_config", "cov_append", "cov_branch", "cov_context", "cov_fail_under", "cov_precision",
    "no_cov", "no_cov_on_fail",
}  # fmt: skip
"""Options, by `dest`, that the line leaves out. It keeps all others: a project's own may change what a test does."""

SELECTION = {"keyword", "markexpr"}
"""Left out too, unless the ini file gives some by `addopts`, which the command line's must then go on to override."""


class Given(NamedTuple):
    """An option as it was given."""

    dest: str
    words: tuple[str, ...]


def given_options(arguments: Sequence[str], flags: Mapping[str, compat.Flag]) -> Iterator[Given]:
    """The options of a command line, each with its values, as argparse tells them from the files."""
    left = list(arguments)

    def values(count: int | str) -> list[str]:
        if isinstance(count, int):
            taken = count
        else:
            most = {"?": 1}.get(count, len(left))
            taken = next((n for n, word in enumerate(left[:most]) if word.startswith("-")), min(most, len(left)))
        found, left[:taken] = left[:taken], []
        return found

    while left:
        word = left.pop(0)
        if word == "--":
            return
        if word.startswith("--"):
            name, equals, _ = word.partition("=")
            flag = flags.get(name)
            yield Given(flag.dest if flag else "", (word, *(() if equals or not flag else values(flag.takes))))
        elif word.startswith("-") and len(word) > 1:
            yield from _given_short(word, flags, values)


def _given_short(
    word: str, flags: Mapping[str, compat.Flag], values: Callable[[int | str], list[str]]
) -> Iterator[Given]:
    """`-x`, `-xs`, `-n2`, `-n 2`."""
    for place, letter in enumerate(word[1:], start=1):
        flag = flags.get(f"-{letter}")
        if flag is None:
            yield Given("", (f"-{word[place:]}",))
            return
        if flag.takes != 0:
            joined = word[place + 1 :]
            yield Given(flag.dest, (f"-{letter}", *([joined] if joined else values(flag.takes))))
            return
        yield Given(flag.dest, (f"-{letter}",))


def kept(options: Sequence[Given], *, selection: bool) -> list[str]:
    """The words of the options that can change what one test does; `selection`: with `-k` and `-m`."""
    dropped = DROPPED if selection else DROPPED | SELECTION
    return [
        word
        for option in options
        if option.dest not in dropped or (option.dest == "numprocesses" and option.words[-1].lstrip("-n=") == "0")
        for word in option.words
    ]


def shell_line(environ: Mapping[str, str], words: Sequence[str]) -> str:
    """A command with variables of its own, as a shell reads it."""
    return " ".join([*(f"{name}={shlex.quote(value)}" for name, value in environ.items()), *map(shlex.quote, words)])


def program(argv: Sequence[str]) -> list[str]:
    """How pytest was started: `pytest` or `python -m pytest`, which also imports from the folder it is started in."""
    started = argv[0] if argv else ""
    if Path(started).name in ("pytest", "py.test"):
        found = shutil.which("pytest")
        return ["pytest" if found is not None and os.path.realpath(found) == os.path.realpath(started) else started]
    return ["python" if shutil.which("python") == sys.executable else sys.executable, "-m", "pytest"]


def target(nodeid: str, path: Path, directory: Path) -> str:
    """The id of a test, with its file as seen from this folder and not from the rootdir."""
    file = os.path.relpath(path, directory)
    _, separator, rest = nodeid.partition("::")
    return f"{f'./{file}' if file.startswith('-') else file}{separator}{rest}"


class Reproducer:
    """Writes the lines of one run."""

    def __init__(self, session: CudaSession) -> None:
        self.session = session
        config = self.config = session.config
        flags = compat.flags(config)
        addopts = os.environ.get("PYTEST_ADDOPTS", "")
        arguments = [*shlex.split(addopts), *map(str, config.invocation_params.args)]
        options = list(given_options(compat.with_files(arguments), flags))
        self.environ = {"PYTEST_ADDOPTS": ""} if addopts.strip() else {}
        """Emptied, as its options are among those of the line."""
        self.options = kept(options, selection=bool(config.getini("addopts")))
        self.options += self._options_of_ours()
        seed = config.getoption("randomly_seed", None)
        if isinstance(seed, int):
            self.options.append(f"--randomly-seed={seed}")
        if hasattr(config, "workerinput") and not any(o.dest in ("numprocesses", "tx") for o in options):
            self.options += ["-n", "0"]  # the ini file asks for workers
        self.is_rooted = any(o.dest in ("inifilename", "rootdir") for o in options)

    def _options_of_ours(self) -> list[str]:
        """What this plugin was told by the environment, which another shell would not tell it."""
        words: list[str] = []
        for option in OPTIONS:
            text = os.environ.get(option.variable, "")
            if given(self.config, option) is None and text.strip() and option.dest not in DROPPED:
                values = text.split() if option.repeated else [text]
                words += [f"{option.flag}={value}" for value in values]
        return [*words, "--cuda-isolation", self.session.settings.isolation]

    def line(self, item: pytest.Item, mask: Mapping[str, str]) -> str:
        """What runs this test again, seeing these devices."""
        config, directory = self.config, self.config.invocation_params.dir
        argv = getattr(config, "workerinput", {}).get("mainargv", sys.argv)
        words = [*program(argv), *self.options, *self._visible(mask)]
        if not self.is_rooted and compat.would_find(config, item.path) != (config.rootpath, config.inipath):
            words += [f"--rootdir={config.rootpath}"]
            words += ["-c", str(config.inipath)] if config.inipath is not None else []
        words.append(target(compat.collected_id(item), item.path, directory))
        return shell_line({**mask, **self.environ}, words)

    def _visible(self, mask: Mapping[str, str]) -> list[str]:
        """The mask has been narrowed to `--cuda-visible` already; what the ini file says of it counts no more."""
        visible = next(option for option in OPTIONS if option.name == "visible")
        if self.session.settings.visible is None or given(self.config, visible) is not None:
            return []
        count = len(mask.get("CUDA_VISIBLE_DEVICES", "").split(","))
        return [f"{visible.flag}={','.join(map(str, range(count)))}"]

    def title(self, item: pytest.Item) -> str:
        """The heading of the line, with the seed that the test's id has made."""
        plan = item.stash.get(PLAN, None)
        if plan is None or not plan.is_seeded:
            return "Reproduce"
        return f"Reproduce (seed {seed_of(item, self.session.runner.session_seed)})"
