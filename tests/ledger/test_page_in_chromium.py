"""The page, in a real Chromium: what it shows and filters, by keyboard, narrow and wide, light and dark."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ledger_strategies import DEVICE, IF_ANY, NASTY, Book, judged

from benchmarks.fabricated_ledgers import A10G, CPU, H200, H200X2, ledger, suite
from pytest_cudaenv.ledger.merge_page import page

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
Keys = pytest.importorskip("selenium.webdriver.common.keys").Keys

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--force-device-scale-factor=1",
)  # fmt: skip

pytestmark = [
    pytest.mark.skipif(not CHROMIUM, reason="no Chromium: apt-get install chromium"),
    pytest.mark.skipif(not DRIVER, reason="no chromedriver: apt-get install chromium-driver"),
]


class Page:
    """A page that a browser shows."""

    def __init__(self, driver: Any, path: Path) -> None:
        self.driver = driver
        self.path = path

    def open(self, fragment: str = "", *, width: int = 1400, dark: bool = False) -> Page:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        self.driver.get("about:blank")
        self.driver.get(f"{self.path.as_uri()}{fragment}")
        assert self.run("return document.documentElement.hasAttribute('data-ready')")
        return self

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def find(self, selector: str) -> Any:
        return self.driver.find_element("css selector", selector)

    def all(self, selector: str) -> list[Any]:
        return list(self.driver.find_elements("css selector", selector))

    def texts(self, selector: str) -> list[str]:
        return [element.text for element in self.all(selector)]

    @property
    def ids(self) -> list[str]:
        """The tests that the list shows."""
        return list(
            self.run("return [...document.querySelectorAll('.list .id')].map((e) => e.textContent.toWellFormed())")
        )

    @property
    def count(self) -> str:
        return str(self.run("return document.getElementById('count').textContent"))

    def choose(self, name: str, value: str) -> None:
        """Choose in a filter, as a click does; a text takes a moment to be heard."""
        self.run(
            "const [name, value] = arguments; const input = document.querySelector(`[name=${name}]`);"
            "input.value = value; input.dispatchEvent(new Event(input.tagName === 'INPUT' ? 'input' : 'change'))",
            name,
            value,
        )
        self.settle()

    def click(self, selector: str, number: int = 0) -> None:
        element = self.all(selector)[number]
        self.run("arguments[0].scrollIntoView({block: 'center'})", element)
        element.click()
        self.settle()

    def settle(self) -> None:
        self.driver.execute_async_script("setTimeout(arguments[0], 200)")

    @property
    def complaints(self) -> list[Any]:
        """What the browser's console holds: errors, refused loads, and breaches of the policy."""
        return list(self.driver.get_log("browser"))


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """One browser for all pages."""
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    driver.set_script_timeout(60)
    yield driver
    driver.quit()


def written(folder: Path, verdict: Any) -> Path:
    path = folder / "page.html"
    path.write_text("".join(page(verdict)), encoding="utf-8", errors="backslashreplace")
    return path


@pytest.fixture(scope="module")
def shown(driver: Any, tmp_path_factory: pytest.TempPathFactory) -> Page:
    """A page on four runners of a suite of 300 tests, with something of everything."""
    cases = suite(300)
    extra = (
        Book(H200)
        .skip("tests/z.py::test_never[flash_attention_2-fp16]", DEVICE, cell="flash_attention_2-fp16")
        .test("tests/z.py::test_failed", "failed", DEVICE, message="AssertionError: off", memory=5 * 1024**3)
        .test("tests/z.py::test_idle", needs=DEVICE, idle=True)
        .skip("tests/z.py::test_breach", DEVICE, breach="flash_attention_2")
    )
    books = [ledger(cases, profile, failing=0) for profile in (CPU, A10G, H200, H200X2)]
    path = written(tmp_path_factory.mktemp("page"), judged(*books, extra, expected=["cpu", "a10g", "h200", "b200"]))
    return Page(driver, path)


def test_the_verdict_stands_at_the_top(shown: Page) -> None:
    shown.open()
    assert shown.find("#headline").text.startswith("✗ RED: 1 missing runner, 1 failed somewhere, ")
    findings = shown.texts("#findings li")
    assert findings[0].splitlines()[0] == "✗ red: missing runner: 1"
    assert "b200: no ledger is of this runner" in findings[0]
    assert findings[-1].startswith("to know: unexpected runner: 1")
    assert shown.complaints == []


def test_a_finding_lists_its_tests(shown: Page) -> None:
    shown.open()
    for button in range(len(shown.all("#findings button"))):
        number = shown.texts("#findings button")[button].rpartition(" ")[2]
        shown.click("#findings button", button)
        assert shown.count.startswith(f"{number} of 304 tests")
    shown.choose("status", "idle")
    assert "tests/z.py::test_idle" in shown.ids


def test_a_square_of_the_matrix_lists_its_tests(shown: Page) -> None:
    shown.open()
    label = "flash_attention_2 fp16 on NVIDIA A10G"
    place = next(n for n, e in enumerate(shown.all(".square")) if e.get_attribute("aria-label").startswith(label))
    square = shown.all(".square")[place].get_attribute("aria-label")
    ran, tests = (int(n) for n in square.removeprefix(f"{label}: ").split(" ran")[0].split(" of "))
    assert tests == ran + 1  # the one that never ran
    shown.click(".square", place)
    assert shown.ids == ["tests/z.py::test_never[flash_attention_2-fp16]"]
    shown.choose("on", "ran")
    assert shown.count == f"{ran} of 304 tests"


def test_every_square_lists_as_many_tests_as_it_says(shown: Page) -> None:
    shown.open()
    for place, square in enumerate(shown.all(".square:not(.empty)")):
        label = square.get_attribute("aria-label").rpartition(": ")[2]
        ran, tests = (int(n) for n in label.split(" ran")[0].split(" of "))
        failed = int(label.partition(", ")[2].split(" failed")[0]) if "failed" in label else 0
        shown.click(".square:not(.empty)", place)
        expected = failed or (tests - ran if tests > ran else ran)
        assert shown.count == f"{expected} of 304 test{'' if expected == 304 else 's'}", label


def test_filters_and_search_narrow_together(shown: Page) -> None:
    shown.open()
    assert shown.count == "304 tests"
    shown.choose("q", "TEST_ z.py")
    assert len(shown.ids) == 4
    shown.choose("runner", "h200")
    shown.choose("outcome", "failed")
    assert shown.ids == ["tests/z.py::test_failed"]
    shown.choose("outcome", "not run")
    assert len(shown.ids) == 2
    shown.choose("status", "breach")
    assert shown.ids == ["tests/z.py::test_breach"]
    shown.choose("q", "nothing like this")
    assert shown.ids == []
    shown.click("#clear")
    assert shown.count == "304 tests"
    shown.choose("file", "tests/z.py")
    assert len(shown.ids) == 4
    shown.choose("sort", "memory")
    assert shown.ids[0] == "tests/z.py::test_failed"


def test_a_reason_lists_the_tests_that_it_kept_from_running(shown: Page) -> None:
    shown.open()
    place = next(n for n, text in enumerate(shown.texts("#reasons li")) if "FA2 needs flash-attn; have none" in text)
    assert shown.texts("#reasons li")[place].splitlines()[0] == "2"
    assert "Run pip install flash-attn." in shown.texts("#reasons li")[place]
    shown.click("#reasons button", place)
    assert shown.ids == ["tests/z.py::test_breach", "tests/z.py::test_never[flash_attention_2-fp16]"]
    shown.choose("why", "code:attn-capability")
    assert shown.ids
    assert all("flash_attention_3" in test for test in shown.ids)


def test_the_address_holds_the_filters(shown: Page) -> None:
    shown.open()
    shown.choose("status", "breach")
    address = shown.run("return location.hash")
    shown.open(address)
    assert shown.ids == ["tests/z.py::test_breach"]
    assert shown.find("[name=status]").get_attribute("value") == "breach"


def test_a_test_opens_with_the_keyboard_and_tells_all(shown: Page) -> None:
    shown.open("#q=test_failed")
    shown.run("document.querySelector('[name=q]').focus()")
    for _ in range(20):
        shown.driver.switch_to.active_element.send_keys(Keys.TAB)
        if shown.run("return document.activeElement.tagName") == "SUMMARY":
            break
    shown.driver.switch_to.active_element.send_keys(Keys.ENTER)
    shown.settle()
    (details,) = shown.texts(".more")
    for told in ("AssertionError: off", "NVIDIA H200", "5.0 GiB", "devices 1", "failed somewhere"):
        assert told in details


def test_many_tests_come_in_pages(shown: Page) -> None:
    shown.open()
    assert len(shown.ids) == 100
    first = shown.ids
    assert "page 1 of 4" in shown.find("#pages").text
    shown.click("#pages button", 2)
    assert "page 2 of 4" in shown.find("#pages").text
    assert not set(first) & set(shown.ids)
    shown.click("#pages button", 3)
    assert len(shown.ids) == 4
    shown.choose("q", "z.py")
    assert not shown.all("#pages button")


def test_charts_follow_the_filters(shown: Page) -> None:
    shown.open()
    assert len(shown.all("#charts svg")) == 4
    assert "tests/z.py" not in shown.find("#charts svg").get_attribute("aria-label")
    shown.choose("file", "tests/z.py")
    labels = [svg.get_attribute("aria-label") for svg in shown.all("#charts svg")]
    assert labels[0].startswith("Time by file, on all runners together: tests/z.py ")
    assert labels[3] == "Largest memory peaks: tests/z.py::test_failed 5.0 GiB"


@pytest.mark.parametrize("width", [360, 768, 1400])
def test_nothing_is_wider_than_the_window(shown: Page, width: int) -> None:
    shown.open(width=width)
    for details in shown.all(".list summary")[:3]:
        shown.run("arguments[0].click()", details)
    shown.settle()
    assert shown.run("return document.documentElement.scrollWidth - document.documentElement.clientWidth") == 0
    wide = shown.run(
        "const edge = document.documentElement.clientWidth + 1;"
        "return [...document.querySelectorAll('body *')].filter((e) => !e.closest('.scroll, svg, .skip'))"
        ".filter((e) => e.getBoundingClientRect().right > edge).map((e) => e.outerHTML.slice(0, 99))"
    )
    assert wide == []


LUMINANCE = """
  const of = (colour) => {
    const [r, g, b] = colour.match(/[\\d.]+/g).slice(0, 3).map((v) => v / 255)
      .map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (e) => {
    for (; e; e = e.parentElement) {
      const colour = getComputedStyle(e).backgroundColor;
      if (!/, 0\\)$/.test(colour)) return colour;
    }
  };
  const found = [];
  for (const e of document.querySelectorAll('body *')) {
    const hasText = [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
    const isShown = e.getClientRects().length && !e.closest(':disabled, script, noscript, .skip');
    if (!hasText || !isShown) continue;
    const style = getComputedStyle(e);
    const [a, b] = [of(e.closest('svg') ? style.fill : style.color), of(behind(e))].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < 4.5) found.push([e.textContent.slice(0, 40), ratio.toFixed(2)]);
  }
  return found;
"""


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_every_text_stands_out_from_what_is_behind_it(shown: Page, dark: bool) -> None:
    shown.open(dark=dark)
    shown.run("document.querySelector('.list summary').click()")
    shown.settle()
    assert shown.run(LUMINANCE) == []


def test_the_theme_follows_the_system_until_it_is_chosen(shown: Page) -> None:
    background = "return getComputedStyle(document.body).backgroundColor"
    light, dark = (shown.open(dark=is_dark).run(background) for is_dark in (False, True))
    assert light != dark
    choose = "const t = document.getElementById('theme'); t.value = arguments[0]; t.dispatchEvent(new Event('change'))"
    shown.run(choose, "light")
    assert shown.run(background) == light
    assert shown.open(dark=True).run(background) == light  # and it is remembered
    shown.run(choose, "dark")
    assert shown.open(dark=False).run(background) == dark
    shown.run(choose, "auto")
    assert shown.open(dark=False).run(background) == light


def test_controls_have_names_and_headings_are_in_order(shown: Page) -> None:
    shown.open()
    nameless = shown.run(
        "return [...document.querySelectorAll('input, select, button, [role=img], [role=region], summary')]"
        ".filter((e) => !(e.getAttribute('aria-label') || e.labels?.length || e.textContent.trim())).length"
    )
    assert nameless == 0
    levels = shown.run("return [...document.querySelectorAll('h1, h2, h3')].map((e) => Number(e.tagName[1]))")
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(b - a <= 1 for a, b in itertools.pairwise(levels))
    assert len(set(shown.run("return [...document.querySelectorAll('[id]')].map((e) => e.id)"))) == len(
        shown.all("[id]")
    )


def test_ids_are_text_and_never_markup(driver: Any, tmp_path: Path) -> None:
    book = Book(CPU, runner="<b>cpu</b>")
    for test in NASTY:
        book.test(test, "failed", message=test, cell=test)
        book.skip(f"skip::{test}", skip=test)
    shown = Page(driver, written(tmp_path, judged(book))).open()
    tests = sorted(NASTY)
    assert sorted(test for test in shown.ids if "skip::" not in test) == [
        test.replace("\udcff", "\ufffd") for test in tests
    ]
    assert not shown.all("b")
    assert shown.complaints == []


def test_the_policy_refuses_what_is_not_the_pages_own(shown: Page) -> None:
    shown.open()
    outcome = shown.driver.execute_async_script(
        "const done = arguments[0];"
        "document.addEventListener('securitypolicyviolation', (e) => done(e.effectiveDirective));"
        "const script = document.createElement('script'); script.textContent = 'document.title = 1';"
        "document.body.append(script); setTimeout(() => done('ran'), 2000)"
    )
    assert outcome == "script-src-elem"
    assert shown.complaints  # the refusal


def test_a_page_of_a_fine_merge_with_little_to_show(driver: Any, tmp_path: Path) -> None:
    shown = Page(
        driver, written(tmp_path, judged(Book(CPU).test("t::a"), Book(H200).test("t::b", needs=IF_ANY)))
    ).open()
    assert shown.find("#headline").text.startswith("✓ fine: 2 tests, 2 ran")
    assert "Every test ran" in shown.find("#reasons").text
    assert "No test that is left tells of it." in shown.find("#charts").text
    assert shown.complaints == []
