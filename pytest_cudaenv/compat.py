"""Every private name of pytest that is used, each with a link to what it relies on.

Nothing else in the package may touch a name of pytest that starts with an underscore or that its reference does
not list, so that a new pytest is one file's work.
"""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import pytest


class NamedMark(pytest.MarkDecorator):
    """A mark that is applied to functions and classes only, and says so when it is given something else.

    A subclass, because `pytest.param(marks=…)` and `pytestmark` accept nothing but `MarkDecorator`; its
    constructor wants `_ispytest`:
    https://github.com/pytest-dev/pytest/blob/9.2.0/src/_pytest/mark/structures.py (class MarkDecorator)
    """

    signature: Callable[..., object]

    def __init__(self, mark: pytest.Mark, signature: Callable[..., object]) -> None:
        super().__init__(mark, _ispytest=True)
        # MarkDecorator is a frozen-looking dataclass in some releases; both accept this.
        object.__setattr__(self, "signature", signature)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Decorate a function or class, or take the marker's arguments; a TypeError names what went wrong."""
        if len(args) == 1 and not kwargs and not isinstance(args[0], str):
            target = args[0]
            if inspect.isclass(target) or is_test_callable(target):
                check_call(self.name, self.signature, *self.args, **self.kwargs)
                return super().__call__(target)
            if self.args or self.kwargs or not _takes(self.signature, target):
                raise TypeError(not_decorable(self.name, target))
        check_call(self.name, self.signature, *self.args, *args, **{**self.kwargs, **kwargs})
        return self.with_args(*args, **kwargs)

    def with_args(self, *args: object, **kwargs: object) -> NamedMark:
        """The same mark with these arguments added, still one of ours."""
        return NamedMark(super().with_args(*args, **kwargs).mark, self.signature)


def named_mark(name: str, signature: Callable[..., object]) -> NamedMark:
    """The decorator of a marker whose arguments `signature` validates.

    `Mark` is built directly: `getattr(pytest.mark, name)` fails under `--strict-markers` before the plugin has
    registered its markers. https://github.com/pytest-dev/pytest/blob/9.2.0/src/_pytest/mark/structures.py
    """
    return NamedMark(pytest.Mark(name, (), {}, _ispytest=True), signature)


def is_test_callable(target: object) -> bool:
    """Whether pytest would put a mark on this object rather than read it as a marker's argument."""
    if isinstance(target, (staticmethod, classmethod)):
        target = target.__func__
    return callable(target) and getattr(target, "__name__", "<lambda>") != "<lambda>"


def check_call(name: str, signature: Callable[..., object], *args: object, **kwargs: object) -> object:
    """What a marker's arguments declare; TypeError or ValueError that carries the marker's own signature."""
    try:
        return signature(*args, **kwargs)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{error}. Usage: {name}{arguments_of(signature)}") from None


def arguments_of(signature: Callable[..., object]) -> str:
    """`(devices=1, memory=None)`: names and defaults, as `pytest --markers` prints them."""
    parameters = [p.replace(annotation=p.empty) for p in inspect.signature(signature).parameters.values()]
    return str(inspect.Signature(parameters))


def not_decorable(name: str, target: object) -> str:
    """The message for a decorator that was given what is neither a function nor a class."""
    if target is None:
        return f"@{name} was applied to None: put @{name} below @parameterized.expand, which leaves no function behind"
    if isinstance(target, (list, tuple, set, dict)):
        return f"@{name} takes its values one by one, {name}('a', 'b'), not in a {type(target).__name__}: {target!r}"
    return f"@{name} goes on a function or a class, not on {type(target).__name__} {target!r}"


def _takes(signature: Callable[..., object], value: object) -> bool:
    """Whether the marker accepts one positional argument of this kind (a count, a dict), and None never."""
    if value is None:
        return False
    try:
        signature(value)
    except ValueError:
        return True  # the right shape with a wrong value: `check_call` gives the message
    except TypeError:
        return False
    return True


def skip_at_test(message: str) -> NoReturn:
    """Skip the running test, located at the test and not at this plugin.

    `_use_item_location` is what `@pytest.mark.skip` itself uses:
    https://github.com/pytest-dev/pytest/blob/9.2.0/src/_pytest/skipping.py (pytest_runtest_setup)
    """
    raise pytest.skip.Exception(message, _use_item_location=True)


def own_skip(item: pytest.Item) -> str | None:
    """Why the test's own `skip` or `skipif` marks skip it; None where none does.

    https://github.com/pytest-dev/pytest/blob/9.2.0/src/_pytest/skipping.py (evaluate_skip_marks)
    """
    from _pytest.skipping import evaluate_skip_marks

    try:
        skip = evaluate_skip_marks(item)
    except pytest.fail.Exception:
        return None  # a condition that cannot be evaluated is an error of the run, when it comes to it
    return None if skip is None else skip.reason


def our_fixtures(item: pytest.Item, package: str) -> frozenset[str]:
    """Names in the test's fixture closure that resolve to a fixture of `package`, or extend one.

    A suite's own `device` fixture is the suite's, unless it requests the fixture that it overrides.
    `_fixtureinfo`: https://github.com/pytest-dev/pytest/blob/9.2.0/src/_pytest/fixtures.py (class FuncFixtureInfo)
    """
    info = getattr(item, "_fixtureinfo", None)
    if info is None:
        return frozenset()
    return frozenset(
        name for name, definitions in info.name2fixturedefs.items() if _ends_in(name, definitions, package)
    )


def _ends_in(name: str, definitions: Any, package: str) -> bool:
    for definition in reversed(definitions):
        if getattr(definition.func, "__module__", "").startswith(package + "."):
            return True
        if name not in definition.argnames:
            return False
    return False


def parameters(item: pytest.Item) -> dict[str, Any]:
    """The parameters with which a test was generated; empty for one that is not parametrized.

    `callspec`: https://github.com/pytest-dev/pytest/blob/9.2.0/src/_pytest/python.py (class CallSpec2)
    """
    callspec = getattr(item, "callspec", None)
    return dict(callspec.params) if callspec is not None else {}


def parametrized_names(metafunc: pytest.Metafunc) -> set[str]:
    """Argument names that the test's own `parametrize` marks give values to."""
    names: set[str] = set()
    for mark in metafunc.definition.iter_markers("parametrize"):
        argnames = mark.kwargs.get("argnames", mark.args[0] if mark.args else ())
        names.update(n.strip() for n in argnames.split(",")) if isinstance(argnames, str) else names.update(argnames)
    return names


def metafunc_fixtures(metafunc: pytest.Metafunc, package: str) -> frozenset[str]:
    """`our_fixtures` of a test that is about to be generated.

    `_arg2fixturedefs`: https://github.com/pytest-dev/pytest/blob/9.2.0/src/_pytest/python.py (class Metafunc)
    """
    return frozenset(n for n, definitions in metafunc._arg2fixturedefs.items() if _ends_in(n, definitions, package))


def finish_fixture(definition: Any, request: pytest.FixtureRequest) -> None:
    """Tear down a fixture and everything that was built on it, before its scope ends; once, however often called.

    `FixtureDef.finish` is what pytest itself calls when a parameter changes:
    https://github.com/pytest-dev/pytest/blob/9.2.0/src/_pytest/fixtures.py (FixtureDef.execute)
    """
    definition.finish(request)


def add_finalizer(definition: Any, finalizer: Callable[[], object]) -> None:
    """Have this called when a fixture that has just been set up is torn down, before its own teardown.

    https://github.com/pytest-dev/pytest/blob/9.2.0/src/_pytest/fixtures.py (FixtureDef.addfinalizer, finish)
    """
    definition.addfinalizer(finalizer)


def mute(config: pytest.Config, hooks: tuple[str, ...], keep: tuple[object, ...]) -> None:
    """Take every plugin but `keep` off these hooks, for the rest of the process.

    pluggy has no public call for that; `_remove_plugin` is what `unregister` uses:
    https://github.com/pytest-dev/pluggy/blob/1.6.0/src/pluggy/_hooks.py (HookCaller)
    """
    for name in hooks:
        caller = getattr(config.hook, name)
        for implementation in list(caller.get_hookimpls()):
            if not any(implementation.plugin is plugin for plugin in keep):
                caller._remove_plugin(implementation.plugin)


def tear_down_to(session: pytest.Session, nextitem: pytest.Item | None) -> None:
    """Tear down what `nextitem` does not share with the last test (None: everything). Raises what teardown raises.

    `_setupstate`: https://github.com/pytest-dev/pytest/blob/9.2.0/src/_pytest/runner.py (class SetupState)
    """
    state = session._setupstate
    if nextitem is not None and not set(state.stack) - set(nextitem.listchain()):
        return  # nothing stands that the next test does not share
    state.teardown_exact(nextitem)


def teardown_report(item: pytest.Item, error: BaseException) -> pytest.TestReport:
    """The report of an error that was raised by tearing down, put down to `item`.

    `CallInfo.from_call` is public; the constructor that takes an exception is not:
    https://github.com/pytest-dev/pytest/blob/9.2.0/src/_pytest/runner.py (class CallInfo)
    """

    def fail() -> None:
        raise error

    call: pytest.CallInfo[None] = pytest.CallInfo.from_call(fail, when="teardown")
    return pytest.TestReport.from_item_and_call(item, call)


def make_basetemp(config: pytest.Config) -> Path | None:
    """Have the run's temporary folder made now, so that forks of this process share it; None without `tmpdir`.

    `_tmp_path_factory`: https://github.com/pytest-dev/pytest/blob/9.2.0/src/_pytest/tmpdir.py (pytest_configure)
    """
    factory = getattr(config, "_tmp_path_factory", None)
    if factory is None:
        return None
    basetemp: Path = factory.getbasetemp()
    return basetemp


def drain_capture(config: pytest.Config) -> tuple[str, str]:
    """What was captured, and is not yet part of a report: (stdout, stderr); empty where nothing captures.

    https://github.com/pytest-dev/pytest/blob/9.2.0/src/_pytest/capture.py (CaptureManager.read_global_capture)
    """
    manager = config.pluginmanager.get_plugin("capturemanager")
    if manager is None or not manager.is_globally_capturing():
        return "", ""
    captured = manager.read_global_capture()
    return captured.out, captured.err


def mirror_capture(config: pytest.Config, files: Mapping[str, int]) -> dict[str, int]:
    """In a device process: have what is captured in memory written to these files ("out", "err") as well, until read.

    Returns the descriptors of what is captured into files anyway. `_global_capturing`, and `tmpfile` of its parts:
    https://github.com/pytest-dev/pytest/blob/9.2.0/src/_pytest/capture.py (MultiCapture, SysCapture, FDCapture)
    """
    manager: Any = config.pluginmanager.get_plugin("capturemanager")
    captured: dict[str, int] = {}
    for name, file in files.items():
        capture = getattr(getattr(manager, "_global_capturing", None), name, None)
        tmpfile: Any = getattr(capture, "tmpfile", None)
        if tmpfile is None:
            continue
        if hasattr(capture, "targetfd"):
            captured[name] = tmpfile.fileno()
        else:
            _mirror(tmpfile, file)
    return captured


def _mirror(stream: Any, file: int) -> None:
    write, truncate = stream.write, stream.truncate

    def write_both(text: str) -> int:
        count: int = write(text)
        with contextlib.suppress(OSError):
            os.write(file, text.encode(errors="replace"))
        return count

    def truncate_both(size: int | None = None) -> int:
        with contextlib.suppress(OSError):
            os.ftruncate(file, 0)
        count: int = truncate(size)
        return count

    stream.write, stream.truncate = write_both, truncate_both


def redirect_exit_on_timeout(config: pytest.Config, file: int) -> None:
    """In a device process: with `faulthandler_exit_on_timeout`, stacks go to this file before the process ends.

    `fault_handler_stderr_fd_key`: https://github.com/pytest-dev/pytest/blob/9.2.0/src/_pytest/faulthandler.py
    """
    if not config.pluginmanager.has_plugin("faulthandler"):
        return
    with contextlib.suppress(ImportError, KeyError, ValueError):
        from _pytest.faulthandler import fault_handler_stderr_fd_key, get_exit_on_timeout_config_value

        if get_exit_on_timeout_config_value(config):
            config.stash[fault_handler_stderr_fd_key] = file


def worker_descriptors(config: pytest.Config) -> list[int]:
    """The descriptors over which an xdist worker talks to its controller; empty outside a worker.

    `channel.gateway._io` of execnet's gateway: https://github.com/pytest-dev/execnet/blob/v2.1.1/src/execnet/gateway_base.py
    """
    plugins = config.pluginmanager.get_plugins()
    interactor = next((p for p in plugins if type(p).__name__ == "WorkerInteractor"), None)
    io = getattr(getattr(getattr(interactor, "channel", None), "gateway", None), "_io", None)
    files = [getattr(io, name, None) for name in ("infile", "outfile")]
    return [file.fileno() for file in files if file is not None]


def silence(config: pytest.Config, plugin: object) -> None:
    """Call none of a plugin's hooks any more, and leave it registered for those who look it up.

    https://github.com/pytest-dev/pluggy/blob/1.6.0/src/pluggy/_hooks.py (HookCaller._remove_plugin)
    """
    for caller in config.pluginmanager.get_hookcallers(plugin) or ():
        with contextlib.suppress(ValueError):
            caller._remove_plugin(plugin)


@contextlib.contextmanager
def uncaptured(config: pytest.Config) -> Iterator[None]:
    """A block in which descriptors 0 to 2 are those that pytest was started with.

    Between the phases of tests only standard input is not; what resumes the capture then resumes that as well:
    https://github.com/pytest-dev/pytest/blob/9.2.0/src/_pytest/capture.py (MultiCapture.resume_capturing)
    """
    manager: Any = config.pluginmanager.get_plugin("capturemanager")
    capturing = getattr(manager, "_global_capturing", None)
    was_started = capturing is not None and capturing.is_started()
    if capturing is not None:
        manager.suspend_global_capture(in_=True)
    try:
        yield
    finally:
        if was_started:
            manager.resume_global_capture()


def xdist_group(item: pytest.Item) -> str | None:
    """The name of the group that a test's `xdist_group` marks put it in; None where it has no such mark.

    https://github.com/pytest-dev/pytest-xdist/blob/v3.8.0/src/xdist/remote.py (pytest_collection_modifyitems)
    """
    marks = item.iter_markers("xdist_group")
    names = {str(mark.args[0] if mark.args else mark.kwargs.get("name", "default")) for mark in marks}
    return "_".join(sorted(names)) if names else None


def collected_id(item: pytest.Item) -> str:
    """A test's id as it was collected, without the group that xdist appends in workers under `--dist loadgroup`."""
    if not getattr(item.config.option, "loadgroup", False):
        return item.nodeid
    group = xdist_group(item)
    return item.nodeid if group is None else item.nodeid.removesuffix(f"@{group}")


def allow_choice(manager: pytest.PytestPluginManager, group: str, flag: str, choice: str) -> None:
    """Have another plugin's option, which is declared already, accept one more value.

    `Config._parser`, and `Argument.attrs`, in which the list of choices is the one that argparse looks into:
    https://github.com/pytest-dev/pytest/blob/9.2.0/src/_pytest/config/argparsing.py (class Argument)
    """
    config: Any = manager.get_plugin("pytestconfig")
    parser: pytest.Parser = config._parser
    for option in parser.getgroup(group).options:
        if flag in option.names():
            choices = option.attrs().get("choices")
            if isinstance(choices, list) and choice not in choices:
                choices.append(choice)


def terminal_line(config: pytest.Config) -> str | None:
    """The line that the terminal reporter is writing, which progress is right-aligned by; None without a terminal.

    `_tw`, `_current_line`: https://github.com/pytest-dev/pytest/blob/9.2.0/src/_pytest/_io/terminalwriter.py
    """
    writer = getattr(config.pluginmanager.get_plugin("terminalreporter"), "_tw", None)
    return getattr(writer, "_current_line", None)


def set_terminal_line(config: pytest.Config, line: str | None) -> None:
    """Have the terminal reporter go on after this line, which another process has written."""
    writer = getattr(config.pluginmanager.get_plugin("terminalreporter"), "_tw", None)
    if writer is not None and line is not None:
        writer._current_line = line


def is_unittest(item: pytest.Item) -> bool:
    """Whether a test is a method of a `unittest.TestCase`."""
    import unittest

    cls = getattr(item, "cls", None)
    return isinstance(cls, type) and issubclass(cls, unittest.TestCase)


def reports_subtests(item: pytest.Item) -> bool:
    """Whether a `TestCase.subTest` is reported: since pytest 9, or with pytest-subtests.

    unittest asks its result for `addSubTest`, and pytest's result is the item:
    https://github.com/pytest-dev/pytest/blob/9.2.0/src/_pytest/unittest.py (TestCaseFunction)
    """
    return hasattr(item, "addSubTest")


def is_subtest(report: pytest.TestReport) -> bool:
    """Whether a report is of a part of a test: the test's own follows.

    https://github.com/pytest-dev/pytest/blob/9.2.0/src/_pytest/subtests.py (class SubtestReport)
    """
    return hasattr(report, "context")


def subtest_name(report: pytest.TestReport) -> str:
    """A subtest's arguments, as `(cell='sdpa-bf16')`."""
    kwargs = getattr(getattr(report, "context", None), "kwargs", {})
    return f"({', '.join(f'{name}={value}' for name, value in kwargs.items())})"


def failed_subtests(config: pytest.Config, report: pytest.TestReport) -> int:
    """How many subtests of this report's test have failed in this process; 0 before pytest 9.

    https://github.com/pytest-dev/pytest/blob/9.2.0/src/_pytest/subtests.py (failed_subtests_key)
    """
    counts, key = _subtest_counts(config, report)
    return int(counts.get(key, 0))


def set_failed_subtests(config: pytest.Config, report: pytest.TestReport, count: int) -> None:
    """Let pytest know of the failed subtests of another process: a test that passed fails by them."""
    counts, key = _subtest_counts(config, report)
    if count:
        counts[key] = count


def _subtest_counts(config: pytest.Config, report: pytest.TestReport) -> tuple[Any, object]:
    try:
        from _pytest.subtests import failed_subtests_key
    except ImportError:
        return {}, None
    return config.stash.get(failed_subtests_key, {}), getattr(report, "id", report.nodeid)


def keep_subtest_arguments(report: pytest.TestReport, data: dict[str, Any]) -> None:
    """Undo that pytest takes the `repr` of a subtest's arguments once more each time that it rebuilds a report.

    https://github.com/pytest-dev/pytest/blob/9.2.0/src/_pytest/subtests.py (class SubtestContext)
    """
    context = data.get("_subtest.context")
    if context is not None:
        object.__setattr__(report.context, "kwargs", context["kwargs"])


class Text:
    """A failure's text that came from another process: shown as it was, and not taken for a short message."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __str__(self) -> str:
        return self.text

    def toterminal(self, writer: Any) -> None:
        """As pytest calls it: https://github.com/pytest-dev/pytest/blob/9.2.0/src/_pytest/reports.py (toterminal)"""
        writer.line(self.text)


def captured_late(item: pytest.Item) -> contextlib.AbstractContextManager[None]:
    """Captures, for the reports of this test, what is printed outside of its phases.

    https://github.com/pytest-dev/pytest/blob/9.2.0/src/_pytest/capture.py (CaptureManager.item_capture)
    """
    manager = item.config.pluginmanager.get_plugin("capturemanager")
    if manager is None:
        return contextlib.nullcontext()
    capturing: contextlib.AbstractContextManager[None] = manager.item_capture("teardown", item)
    return capturing


def junit_additions(config: pytest.Config, report: pytest.TestReport) -> dict[str, Any]:
    """What `record_xml_attribute` and `record_testsuite_property` noted in this process; empty without junitxml.

    https://github.com/pytest-dev/pytest/blob/9.2.0/src/_pytest/junitxml.py (class LogXML)
    """
    if (xml := _junit(config)) is None:
        return {}
    reporter = xml.node_reporters.get((getattr(report, "id", report.nodeid), None))
    return {"attributes": getattr(reporter, "attrs", {}), "properties": xml.global_properties}


def add_to_junit(config: pytest.Config, report: pytest.TestReport, additions: dict[str, Any]) -> None:
    """Note in this process what another one did; a property that several processes noted alike counts once."""
    if not additions or (xml := _junit(config)) is None:
        return
    if additions["attributes"]:
        xml.node_reporter(report).attrs.update(additions["attributes"])
    xml.global_properties += [pair for pair in additions["properties"] if pair not in xml.global_properties]


def silence_junit(config: pytest.Config) -> None:
    """Have junitxml write no file, and go on noting what its fixtures record."""
    if (xml := _junit(config)) is not None:
        silence(config, xml)


def _junit(config: pytest.Config) -> Any | None:
    from _pytest.junitxml import xml_key

    return config.stash.get(xml_key, None)


class Flag(NamedTuple):
    """An option of the command line, under one of its spellings."""

    dest: str
    takes: int | str
    """How many words follow it, as argparse's `nargs` says it."""


def flags(config: pytest.Config) -> dict[str, Flag]:
    """Every option that this run knows, by each of its spellings.

    `_parser`, and argparse's `_actions`: https://github.com/pytest-dev/pytest/blob/9.2.0/src/_pytest/config/argparsing.py
    (class Parser; before pytest 9 the argparse parser was made anew by `_getparser`)
    """
    parser: Any = config._parser
    argparser: Any = getattr(parser, "optparser", None)
    if not hasattr(argparser, "_actions"):
        argparser = parser._getparser()
    return {
        spelling: Flag(action.dest, 1 if action.nargs is None else action.nargs)
        for action in argparser._actions
        for spelling in action.option_strings
    }


def with_files(arguments: Sequence[str]) -> list[str]:
    """The arguments, with what stands in the file for `@file`, a word on each line.

    https://github.com/pytest-dev/pytest/blob/9.2.0/src/_pytest/config/argparsing.py (fromfile_prefix_chars)
    """
    words: list[str] = []
    for argument in arguments:
        if argument.startswith("@"):
            with contextlib.suppress(OSError):
                words += Path(argument[1:]).read_text(encoding="utf-8").splitlines()
                continue
        words.append(argument)
    return words


def would_find(config: pytest.Config, path: Path) -> tuple[Path, Path | None] | None:
    """The (rootdir, ini file) that pytest would find if it were given this file alone; None where that is unknown.

    https://github.com/pytest-dev/pytest/blob/9.2.0/src/_pytest/config/findpaths.py (determine_setup)
    """
    try:
        from _pytest.config.findpaths import determine_setup

        known = {
            "inifile": None, "override_ini": None, "args": [str(path)], "rootdir_cmd_arg": None,
            "invocation_dir": config.invocation_params.dir, "config": None,
        }  # fmt: skip
        function: Any = determine_setup
        names = inspect.signature(function).parameters
        rootdir, inipath = function(**{name: value for name, value in known.items() if name in names})[:2]
    except Exception:
        return None
    return rootdir, inipath


def failure_of(text: str, location: tuple[str, int | None, str]) -> Any:
    """What a report shows of a failure without traceback: the whole text; its first line where one line is shown.

    A plain string would be shown whole in the short summary, wherever `CI` is set. `location` is a report's.
    Sections can be added to it, and it crosses xdist as a traceback does:
    https://github.com/pytest-dev/pytest/blob/9.2.0/src/_pytest/reports.py (_report_to_json)
    """
    from _pytest._code import code

    entry = code.ReprEntryNative([f"{line}\n" for line in text.splitlines()])
    crash = code.ReprFileLocation(location[0], (location[1] or 0) + 1, text.partition("\n")[0])
    return code.ReprExceptionInfo(code.ReprTraceback([entry], extraline=None, style="native"), crash)


def set_one_line(report: pytest.TestReport, text: str) -> None:
    """Have the short summary, junitxml and `--tb=line` show this of a failure; its traceback stays as it is.

    `reprcrash`, whose message begins with the dotted name of the exception's class:
    https://github.com/pytest-dev/pytest/blob/9.2.0/src/_pytest/terminal.py (_get_line_with_reprcrash_message)
    """
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is not None:
        crash.message = text


def has_passed(report: pytest.TestReport) -> bool:
    """Whether a phase passed, and was not expected to fail.

    https://github.com/pytest-dev/pytest/blob/9.2.0/src/_pytest/skipping.py (wasxfail)
    """
    return report.outcome == "passed" and not hasattr(report, "wasxfail")


def fail(report: pytest.TestReport, text: str) -> None:
    """Make a report that of a failure without traceback, which says this."""
    report.outcome = "failed"
    report.longrepr = failure_of(text, report.location)


def add_section(report: pytest.TestReport, title: str, text: str) -> None:
    """Add a section to what is shown of a failure: below its traceback, in the terminal as in files of reports.

    Not to `report.sections`, of which junitxml takes what was captured only. `addsection`:
    https://github.com/pytest-dev/pytest/blob/9.2.0/src/_pytest/_code/code.py (class ExceptionRepr)
    """
    if isinstance(report.longrepr, str):
        report.longrepr = failure_of(report.longrepr, report.location)
    longrepr: Any = report.longrepr
    if hasattr(longrepr, "addsection"):
        longrepr.addsection(title, text)
    else:
        report.longrepr = Text(f"{report.longreprtext}\n{f' {title} '.center(80, '-')}\n{text}")  # type: ignore[assignment]
