"""pytest's hooks; each a few lines that delegate.

pytest imports this module at every start. It imports neither torch, transformers, pynvml nor packaging, and nothing
of the package that a suite which does not use the plugin would pay for.
"""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from pytest_cudaenv.fixtures.cells import CellLists, cell_fixtures
from pytest_cudaenv.fixtures.devices import (
    ROOT,
    cuda_device,
    cuda_devices,
    cuda_process_id,
    cudaenv_grant,
    device,
    mixed_precision,
)
from pytest_cudaenv.fixtures.hub_kernels import cudaenv_parked_kernels, hub_kernels
from pytest_cudaenv.fixtures.verdict import assert_parity, attn_witness, cuda_memory, expectations
from pytest_cudaenv.names import DIST, HUB_KERNELS, MARKER_LINES
from pytest_cudaenv.options import SWITCH, add_options
from pytest_cudaenv.session import CHECK_INHERITED, NVML_CHECK, SESSION, CudaSession

__all__ = [
    "assert_parity",
    "attn_witness",
    "cuda_device",
    "cuda_devices",
    "cuda_memory",
    "cuda_process_id",
    "cudaenv_grant",
    "cudaenv_parked_kernels",
    "device",
    "expectations",
    "hub_kernels",
    "mixed_precision",
]

CELL_NAMES = frozenset({"attn_backend", "dtype"})

CELL_LISTS = pytest.StashKey[CellLists]()

_sessions: list[CudaSession] = []
"""Runs in progress in this process, innermost last (pytester nests them): whom a module's import concerns."""


def pytest_addoption(parser: pytest.Parser) -> None:
    add_options(parser)


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    from pytest_cudaenv import hookspecs

    pluginmanager.add_hookspecs(hookspecs)


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    dist = getattr(early_config.known_args_namespace, "dist", None)
    if not early_config.getini(SWITCH):
        if dist == DIST:
            raise pytest.UsageError(f"--dist {DIST}: pytest-cudaenv is switched off (ini {SWITCH} = false)")
    else:
        session = early_config.stash[SESSION] = CudaSession(early_config)
        _sessions.append(session)
        early_config.add_cleanup(lambda: _end(session))
        session.begin()
        if dist == DIST:
            from pytest_cudaenv.dist_cuda import DistCuda

            # After xdist, and before conftests, whose own say on the number of workers comes first.
            early_config.pluginmanager.register(DistCuda(session), "cudaenv-dist")


def _end(session: CudaSession) -> None:
    session.end()
    if session in _sessions:
        _sessions.remove(session)


def suite_uses_plugin() -> None:
    """A module of the suite has asked the package for a name."""
    if _sessions:
        _sessions[-1].answer_questions()


def pytest_configure(config: pytest.Config) -> None:
    for line in MARKER_LINES:
        config.addinivalue_line("markers", line)
    session = config.stash.get(SESSION, None)
    if session is None:
        return
    session.configure()
    lists = config.stash[CELL_LISTS] = session.cell_lists
    config.pluginmanager.register(cell_fixtures(lists), "cudaenv-cells")


def pytest_plugin_registered(plugin: object, manager: pytest.PytestPluginManager) -> None:
    if getattr(plugin, "__name__", None) == "xdist.plugin":
        from pytest_cudaenv import compat

        compat.allow_choice(manager, "xdist", "--dist", DIST)
    if _sessions and getattr(plugin, "__file__", None) and Path(str(plugin.__file__)).name == "conftest.py":  # type: ignore[attr-defined]
        _sessions[-1].notice_conftest(plugin)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> None:
    if (session := parent.config.stash.get(SESSION, None)) is not None:
        session.notice_module(module_path)


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    lists = metafunc.config.stash.get(CELL_LISTS, None)
    if lists is not None and not CELL_NAMES.isdisjoint(metafunc.fixturenames):
        from pytest_cudaenv.cells import parametrize

        parametrize(metafunc, lists)
    if lists is not None and HUB_KERNELS in metafunc.fixturenames:
        from pytest_cudaenv import kernel_states

        # From marks and the ini file alone: ids never depend on options or the environment.
        kernel_states.parametrize(metafunc, by_default=metafunc.config.getini("cuda_hub_kernels") == "both")


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    if (session := collector.config.stash.get(SESSION, None)) is not None:
        session.check_collected(report)
    return report


# Neither first nor last: after the conftests' own, which may add marks, and before pytest's, which reads `-m`.
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if (session := config.stash.get(SESSION, None)) is not None:
        session.plan_items(items)


# Innermost, so that the logging plugin's handlers are there when the zygote is forked, and coverage is still being
# measured when the last device process ends.
@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtestloop(session: pytest.Session) -> Generator[None, object, object]:
    state = session.config.stash.get(SESSION, None)
    if state is None:
        return (yield)
    state.end_collection()
    try:
        if state.keeps_books:
            state.bookkeeping.start([item.nodeid for item in session.items])
        state.provide_kernels(session.items)
        state.start_isolation(session)
        state.start_unmarked(session)
        state.start_watching()
        return (yield)
    finally:
        state.end_isolation()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    session = item.config.stash.get(SESSION, None)
    if session is None:
        return None
    if session.isolation is not None and session.isolation.run(item, nextitem):
        return True
    if session.unmarked is not None:
        session.unmarked.begin(item)
    session.before(item)
    return None


@pytest.hookimpl(optionalhook=True, tryfirst=True)
def pytest_timeout_set_timer(item: pytest.Item) -> bool | None:
    # The timer is the device process's; here it would interrupt this plugin and end the run.
    session = item.config.stash.get(SESSION, None)
    return True if session is not None and session.runs_elsewhere(item) else None


# After pytest's own, which skips: what a suite skips itself needs nothing.
def pytest_runtest_setup(item: pytest.Item) -> None:
    if (session := item.config.stash.get(SESSION, None)) is not None:
        session.set_up(item)


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef: Any, request: pytest.FixtureRequest) -> None:
    if fixturedef.argname == ROOT and (session := request.config.stash.get(SESSION, None)) is not None:
        session.runner.note_fixture(fixturedef, request)


# The innermost wrapper: right before all that is none, and right after.
@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    if (session := item.config.stash.get(SESSION, None)) is None:
        return (yield)
    session.call(item)
    try:
        return (yield)
    finally:
        session.body_ends(item)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    if (session := item.config.stash.get(SESSION, None)) is not None:
        session.tear_down(item)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if (session := item.config.stash.get(SESSION, None)) is not None:
        session.describe(item, report, call)
        session.note_failure(item, report)
        session.lead_with_code(report, call)
    return report


# First, as a worker's report is sent to the controller by the same hook.
@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    # The hook has no config: the innermost run is the one that logs.
    if _sessions and (record := getattr(report, "cudaenv", None)) is not None:
        _sessions[-1].add_waiting(report.nodeid, record)
        _sessions[-1].reporting.add(report, record)
    if _sessions and _sessions[-1].keeps_books:
        _sessions[-1].bookkeeping.add(report)


@pytest.hookimpl(tryfirst=True)
def pytest_collectreport(report: pytest.CollectReport) -> None:
    # A module that skips itself; xdist's workers send these to the controller.
    if _sessions and (record := getattr(report, "cudaenv", None)) is not None:
        _sessions[-1].reporting.summary.add(report.nodeid, "setup", report.outcome, record)
        if "breach" in record and _sessions[-1].keeps_books:
            _sessions[-1].bookkeeping.refuse(report.nodeid, record)


def pytest_report_collectionfinish(config: pytest.Config) -> list[str]:
    session = config.stash.get(SESSION, None)
    return session.reporting.header() if session is not None and session.shows_header else []


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    # xdist's controller does not collect: its workers say whether the suite uses the plugin.
    if (session := node.config.stash.get(SESSION, None)) is not None:
        node.workerinput["cudaenv_mailbox"] = session.reporting.mailbox
        node.workerinput["cudaenv_kernels"] = f"{session.reporting.mailbox}-kernels"
        node.workerinput[CHECK_INHERITED] = session.environment.has_set(NVML_CHECK)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    state = session.config.stash.get(SESSION, None)
    if state is not None:
        state.plan_late(session.items)
    workerinput = getattr(session.config, "workerinput", None)
    if state is not None and state.planned and workerinput is not None and "cudaenv_mailbox" in workerinput:
        state.reporting.tell_controller(workerinput["cudaenv_mailbox"])
    if state is not None and workerinput is not None and "cudaenv_requests" in workerinput:
        from pytest_cudaenv.mailbox import tell

        tell(Path(workerinput["cudaenv_requests"]), state, session.items)
    if state is not None and state.planned and workerinput is not None and "cudaenv_kernels" in workerinput:
        state.tell_kernels(workerinput["cudaenv_kernels"], session.items)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(node: Any, ids: list[str]) -> None:
    if (session := node.config.stash.get(SESSION, None)) is not None:
        session.reporting.hear_worker()
        session.hear_kernels()
        if session.keeps_books:
            session.bookkeeping.start_once(ids)


# Last, as conftests turn "no tests ran" into success there.
@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    state = session.config.stash.get(SESSION, None)
    if state is not None and state.keeps_books:
        session.exitstatus = state.bookkeeping.end(int(session.exitstatus))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if (session := config.stash.get(SESSION, None)) is not None:
        session.print_summary(terminalreporter)
