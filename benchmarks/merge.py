"""What merging ten ledgers of 100,000 tests costs, in seconds and memory, and how long the page takes to open.

The page's time is Chromium's own, from the start of the navigation until the page has drawn itself; without Chromium,
selenium and chromedriver it is left out.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.fabricated_ledgers import A10G, CPU, H200, H200X2, ledger, suite, write

TESTS, LEDGERS, OPENINGS = 100_000, 10, 3

FORMS = {"--json": "merged.json", "--markdown": "merged.md", "--junit": "merged.xml", "--html": "merged.html"}


def write_ledgers(folder: Path, tests: int = TESTS, ledgers: int = LEDGERS) -> list[str]:
    """Ledgers of that many runners, each of all tests."""
    cases = suite(tests)
    files = []
    for n in range(ledgers):
        kind = (CPU, A10G, H200, H200X2)[n % 4]
        profile = replace(kind, name=f"{kind.name}-{n // 4 + 1}")
        files.append(write(folder / f"{profile.name}.json", ledger(cases, profile, seed=n)))
    return files


def cost(arguments: Sequence[str]) -> tuple[float, float, float, int]:
    """Seconds, seconds of CPU, peak memory in MB and exit status of a command in a process of its own."""
    started = time.perf_counter()
    process = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - started
    return seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1000, os.waitstatus_to_exitcode(status)


def opening(page: Path) -> list[float] | None:
    """Seconds until the page has drawn itself, several times; None without a browser to ask."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    try:
        from selenium import webdriver
    except ImportError:
        return None
    if not browser or not driver:
        return None
    times = []
    for _ in range(OPENINGS):
        with tempfile.TemporaryDirectory() as profile:
            options = webdriver.ChromeOptions()
            options.binary_location = browser
            for flag in ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", f"--user-data-dir={profile}"):
                options.add_argument(flag)
            chrome = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
            try:
                chrome.get(page.as_uri())
                assert chrome.execute_script("return document.documentElement.hasAttribute('data-ready')")
                times.append(
                    chrome.execute_script("return performance.getEntriesByType('navigation')[0].loadEventEnd") / 1000
                )
            finally:
                chrome.quit()
    return times


def main() -> None:
    """Print the cost of the merge alone, of the merge in every form, and of opening the page."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        files = write_ledgers(folder)
        size = sum(os.path.getsize(file) for file in files) / 1e6
        forms = [part for option, name in FORMS.items() for part in (option, str(folder / name))]
        for name, more in (("to the terminal", []), ("in every form", forms)):
            seconds, busy, memory, status = cost(["-m", "pytest_cudaenv", "merge", *files, *more])
            assert status in {0, 1}, f"exit status {status}"
            print(
                f"merging {LEDGERS} ledgers of {TESTS:,} tests ({size:.0f} MB) {name}: {seconds:.1f} s, of these "
                f"{busy:.1f} s on the CPU; {memory:.0f} MB"
            )
        page = folder / FORMS["--html"]
        times = opening(page)
        shown = "no browser" if times is None else ", ".join(f"{seconds:.2f} s" for seconds in times)
        print(f"opening the page ({page.stat().st_size / 1e6:.1f} MB) in Chromium: {shown}")


if __name__ == "__main__":
    main()
