"""A CUDA context that a test broke: whose failure it is, where it was raised, and what runs again where.

torch is a fake of the suite's own: what it launches breaks CUDA behind Python's back, and every later question raises,
as after an illegal memory access on a device.
"""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from pytest_cudaenv.host.catalog import simulated_host

SIMULATE = ("--cuda-simulate", "h100:2", "--cuda-isolation")

POISON = """
from concurrent.futures import ThreadPoolExecutor
POOL = ThreadPoolExecutor(1)
POOL.submit(int).result()
"""

TORCH = '''
import os
from torch import _C, cuda

def manual_seed(seed): ...

def launch_bad_kernel():
    """Returns at once, as launches do; the error is raised by whoever asks next, or here if launches block."""
    cuda.broken = True
    if os.environ.get("CUDA_LAUNCH_BLOCKING") == "1":
        cuda.synchronize()
'''

CUDA = """
broken, asked = False, []

def is_initialized(): return True
def device_count(): return 1
def current_device(): return 0

def synchronize(device=None):
    if broken: raise RuntimeError("CUDA error: an illegal memory access was encountered\\nCUDA kernel errors might be")
"""

NOTE = """
import os, pytest, torch
def note(name):
    '''How often this was called, in any process.'''
    with open(name, "a") as file: file.write(f"{os.getpid()} {os.environ.get('CUDA_LAUNCH_BLOCKING', '0')}\\n")
    return len(open(name).readlines())
"""


@pytest.fixture
def suite(pytester: pytest.Pytester) -> pytest.Pytester:
    package = pytester.mkpydir("torch")
    (package / "__init__.py").write_text(TORCH)
    (package / "cuda.py").write_text(CUDA)
    (package / "_C.py").write_text("")
    pytester.makeconftest("")
    return pytester


def pids(suite: pytest.Pytester, name: str) -> list[tuple[str, str]]:
    """(process, whether launches blocked there) of every run of a test."""
    return [(pid, blocking) for pid, blocking in map(str.split, (suite.path / name).read_text().splitlines())]


WAYS = [((), ""), (("-n", "1"), ""), ((), POISON), (("-n", "1"), POISON)]
ways = pytest.mark.parametrize(("arguments", "prelude"), WAYS, ids=["plain", "xdist", "fresh", "fresh-xdist"])


def source(body: str, prelude: str) -> str:
    lines = [line.removeprefix("    ") for line in body.splitlines()]
    return NOTE + prelude + "\n".join(lines) + "\n"


@ways
def test_the_failure_shows_where_the_error_is_raised_if_launches_block(
    suite: pytest.Pytester, arguments: tuple[str, ...], prelude: str
) -> None:
    body = """
    def test_before(cuda_device): note("before")
    def test_breaks(cuda_device):
        note("breaks")
        torch.launch_bad_kernel()  # the true line
        torch.cuda.synchronize()  # where it is raised
    def test_after(cuda_device): note("after")
    """
    suite.makepyfile(source(body, prelude))
    result = suite.runpytest_subprocess(*SIMULATE, "session", *arguments)
    assert result.parseoutcomes() == {"passed": 2, "failed": 1, **({"warnings": 1} if prelude else {})}
    text = result.stdout.str()
    assert "[cuda-sticky] this test broke CUDA (CUDA error: an illegal memory access was encountered)" in text
    first, second = text.split("With CUDA_LAUNCH_BLOCKING=1 it is raised here:")
    assert re.search(r"> +torch.cuda.synchronize\(\)  # where it is raised", first)
    assert re.search(r"> +torch.launch_bad_kernel\(\)  # the true line", second)
    (before, _), (one, plain), (two, blocking), (after, _) = (
        *pids(suite, "before"), *pids(suite, "breaks"), *pids(suite, "after")
    )  # fmt: skip
    assert before == one, "one process, until CUDA broke in it"
    assert len({one, two, after}) == 3
    assert (plain, blocking) == ("0", "1")


@ways
def test_a_test_that_leaves_cuda_broken_has_an_error(
    suite: pytest.Pytester, arguments: tuple[str, ...], prelude: str
) -> None:
    body = """
    def test_leaves_it(cuda_device): note("leaves"); torch.launch_bad_kernel()
    def test_after(cuda_device): assert note("after") == 1
    """
    suite.makepyfile(source(body, prelude))
    result = suite.runpytest_subprocess(*SIMULATE, "session", *arguments)
    result.assert_outcomes(passed=2, errors=1, warnings=1 if prelude else 0)
    result.stdout.fnmatch_lines(["*ERROR at teardown of test_leaves_it*", "*[[]cuda-sticky[]] this test left CUDA*"])
    assert len(pids(suite, "leaves")) == 1
    assert pids(suite, "leaves")[0][0] != pids(suite, "after")[0][0]


@ways
def test_a_rerun_has_a_new_process_and_what_was_left_of_the_reruns(
    suite: pytest.Pytester, arguments: tuple[str, ...], prelude: str
) -> None:
    """Four runs for three reruns, whichever of them break CUDA; one more, unpublished, after the last."""
    body = """
    def breaks(): torch.launch_bad_kernel(); torch.cuda.synchronize()
    @pytest.mark.flaky(reruns=3)
    def test_twice(cuda_device):
        if note("twice") < 3: breaks()
    @pytest.mark.flaky(reruns=3)
    def test_always(cuda_device): note("always"); breaks()
    @pytest.mark.flaky(reruns=3)
    def test_mixed(cuda_device):
        if note("mixed") % 2: assert 0, "an ordinary failure"
        breaks()
    """
    suite.makepyfile(source(body, prelude))
    result = suite.runpytest_subprocess(*SIMULATE, "session", *arguments)
    outcomes = result.parseoutcomes()
    assert (outcomes["passed"], outcomes["failed"], outcomes["rerun"]) == (1, 2, 2 + 3 + 3)
    assert len({pid for pid, _ in pids(suite, "twice")}) == len(pids(suite, "twice")) == 3
    assert [blocking for _, blocking in pids(suite, "always")] == ["0"] * 4 + ["1"]
    assert len({pid for pid, _ in pids(suite, "always")}) == 5
    # Ordinary failures are repeated where they happened, those of CUDA in a process of their own.
    seen = [pid for pid, _ in pids(suite, "mixed")]
    assert len(seen) == 5
    assert (seen[0], seen[2]) == (seen[1], seen[3])
    assert len(set(seen)) == 3


def test_a_rerun_that_passes_and_leaves_cuda_broken_has_an_error(suite: pytest.Pytester) -> None:
    body = """
    @pytest.mark.flaky(reruns=1)
    def test_it(cuda_device):
        if note("it") == 1: assert 0
        torch.launch_bad_kernel()
    def test_after(cuda_device): torch.cuda.synchronize()
    """
    suite.makepyfile(source(body, ""))
    result = suite.runpytest_subprocess(*SIMULATE, "session")
    assert result.parseoutcomes() == {"passed": 2, "errors": 1, "rerun": 1}
    result.stdout.fnmatch_lines(["*[[]cuda-sticky[]] this test left CUDA broken*"])


def test_the_second_look_has_an_end_of_its_own(suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that hangs where launches block; its own deadline is much later."""
    body = """
    import time
    @pytest.mark.timeout(2000)
    def test_it(cuda_device):
        if note("it") == 2: time.sleep(1000)
        torch.launch_bad_kernel()
        torch.cuda.synchronize()
    def test_after(cuda_device): pass
    """
    suite.makepyfile(source(body, ""))
    suite.makeconftest("import pytest_cudaenv.isolation\npytest_cudaenv.isolation.LOOKING_AGAIN = 0.5")
    result = suite.runpytest_subprocess(*SIMULATE, "session")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*With CUDA_LAUNCH_BLOCKING=1 its process died or did not end*"])


@pytest.mark.parametrize("what", ["passes", "dies"])
def test_the_second_look_may_see_nothing(suite: pytest.Pytester, what: str) -> None:
    body = f"""
    def test_it(cuda_device):
        if note("it") == 2:
            if {what == "dies"}: os._exit(3)
            return
        torch.launch_bad_kernel()
        torch.cuda.synchronize()
    def test_after(cuda_device): pass
    """
    suite.makepyfile(source(body, ""))
    result = suite.runpytest_subprocess(*SIMULATE, "session")
    result.assert_outcomes(passed=1, failed=1)
    seen = {"passes": "it passed", "dies": "its process died or did not end"}[what]
    result.stdout.fnmatch_lines([f"*With CUDA_LAUNCH_BLOCKING=1 {seen}*"])


def test_every_device_of_the_test_is_asked(suite: pytest.Pytester) -> None:
    """Each has a context of its own, and only those that the process uses are asked."""
    (suite.path / "torch" / "cuda.py").write_text(
        """
broken = set()
def is_initialized(): return True
def device_count(): return 3
def synchronize(device=None):
    assert device != 2, "asking makes a context, which takes memory"
    if device in broken: raise RuntimeError(f"CUDA error on {device}")
"""
    )
    (suite.path / "torch" / "_C.py").write_text("def _cuda_hasPrimaryContext(device): return device < 2\n")
    (suite.path / "torch" / "__init__.py").write_text("from torch import _C, cuda\ndef manual_seed(seed): ...\n")
    suite.makepyfile(
        """
        import torch
        def test_well(cuda_device): pass
        def test_second_device(cuda_device): torch.cuda.broken.add(1)
        """
    )
    result = suite.runpytest_subprocess(*SIMULATE, "session")
    result.assert_outcomes(passed=2, errors=1)
    result.stdout.fnmatch_lines(["*left CUDA broken (CUDA error on 1)*"])


def test_who_debugs_a_failure_is_asked_once(suite: pytest.Pytester) -> None:
    body = """
    def test_it(cuda_device):
        note("it")
        torch.launch_bad_kernel()
        torch.cuda.synchronize()
    def test_after(cuda_device): pass
    """
    suite.makepyfile(source(body, ""))
    command = [sys.executable, "-m", "pytest", *SIMULATE, "session", "--pdb"]
    done = subprocess.run(command, cwd=suite.path, input="c\n", capture_output=True, text=True, timeout=60, check=False)
    assert "1 failed, 1 passed" in done.stdout
    assert done.stdout.count("(Pdb)") == len(pids(suite, "it")) == 1


def test_what_the_driver_has_reported_is_quoted(suite: pytest.Pytester) -> None:
    """Of the test's own devices, in failures of which it may be the cause."""
    first, second = (device.uuid for device in simulated_host("h100:2").devices)
    suite.makeconftest(
        f"""
        from pytest_cudaenv.host.nvml import Xid
        from pytest_cudaenv.isolation import Isolation
        class Watch:
            def seen(self, wait_ms): return Xid(43, {first!r}, None), Xid(79, {second!r}, None)
            def close(self): open("closed", "w").close()
        Isolation._watch_xids = lambda self: Watch()
        """
    )
    body = """
    def test_dies(cuda_device): os._exit(1)
    def test_breaks(cuda_device): torch.launch_bad_kernel(); torch.cuda.synchronize()
    def test_fails(cuda_device): assert 0
    """
    suite.makepyfile(source(body, ""))
    result = suite.runpytest_subprocess(*SIMULATE, "session")
    result.assert_outcomes(failed=3)
    text = result.stdout.str()
    assert text.count(f"Xid 43 on {first} (NVIDIA H100 80GB HBM3) since the run began") == 2
    assert "Xid" not in text[text.index("_ test_fails _") :]
    assert "Xid 79" not in text
    assert (suite.path / "closed").exists()


def test_a_mask_that_is_changed_while_cuda_is_in_use(suite: pytest.Pytester) -> None:
    """It has no effect, which is said; and the next test has its own again, whoever forgot to undo it."""
    body = """
    def test_sets(cuda_device, monkeypatch): monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    def test_leaves(cuda_device): os.environ["CUDA_VISIBLE_DEVICES"] = "7"; del os.environ["CUDA_DEVICE_ORDER"]
    def test_after(cuda_device):
        assert (os.environ["CUDA_VISIBLE_DEVICES"], os.environ["CUDA_DEVICE_ORDER"]) == ("0", "PCI_BUS_ID")
    def test_not_in_use(cuda_device, monkeypatch):
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    """
    suite.makepyfile(source(body, ""))
    result = suite.runpytest_subprocess(*SIMULATE, "session")
    result.assert_outcomes(passed=4, warnings=2)
    assert result.stdout.str().count("[mask-changed] CUDA_VISIBLE_DEVICES was changed while CUDA was in use") == 2
