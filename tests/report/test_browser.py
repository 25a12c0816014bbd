"""The page in a real browser: nothing leaves it, nothing is wrong on it, and it works without a mouse."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from .pages import html_of
from .runs import abc_records, bundle_of, record

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    program = os.environ.get("KVWITNESS_CHROMIUM") or shutil.which("chromium")
    assert program, "no Chromium: `make browser` installs one, KVWITNESS_CHROMIUM names one"
    with sync_playwright() as playwright:
        # A root user has no sandbox to use; the page is the test's own.
        chromium = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a run with twenty requests a series."""
    folder = tmp_path_factory.mktemp("report")
    more = [
        record(f"kvw-{series}-{number}", series, 100 + number, ttft_s=base * (1 + number / 100))
        for series, base in (("A", 0.4), ("B", 0.06))
        for number in range(19)
    ]
    path = folder / "report.html"
    path.write_text(html_of(bundle_of(folder / "bundle", [*abc_records(), *more])), "utf-8")
    return path


@pytest.fixture(params=[(1280, "light"), (400, "light"), (1280, "dark"), (400, "dark")])
def page(request: pytest.FixtureRequest, browser: Browser, report: Path) -> Iterator[Page]:
    width, scheme = request.param
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    found = context.new_page()
    wrong: list[str] = []
    found.on("console", lambda message: wrong.append(message.text))
    found.on("pageerror", lambda error: wrong.append(str(error)))
    found.on("request", lambda asked: wrong.append(asked.url) if asked.url != report.as_uri() else None)
    found.goto(report.as_uri())
    yield found
    assert wrong == []
    context.close()


def test_everything_is_there_and_nothing_sticks_out(page: Page) -> None:
    assert "confirmed for 1 of 1 requests of series C" in page.inner_text("#claim")
    for chart in ("#residency svg", "#timing svg"):
        box = page.locator(chart).bounding_box()
        assert box is not None and box["width"] >= 600 and box["height"] > 100
    for table in ("#timing-table", "#difference-table", "#requests-table", "#witnesses-table"):
        assert page.locator(table).is_visible()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    # What is wider than the screen scrolls within itself, also by keyboard.
    assert page.locator(".scroll:not([tabindex='0'])").count() == 0


def test_text_stands_out_from_the_paper(page: Page) -> None:
    """The contrast that WCAG asks of texts (4.5), in both themes, for the page and for its charts."""
    low = page.evaluate(
        """() => {
        const channel = (v) => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
        const luminance = (c) => {
          const [r, g, b] = c.match(/[\\d.]+/g).map(Number);
          return 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
        };
        const paper = luminance(getComputedStyle(document.body).backgroundColor);
        const contrast = (c) => {
          const other = luminance(c);
          return (Math.max(paper, other) + 0.05) / (Math.min(paper, other) + 0.05);
        };
        const texts = [...document.querySelectorAll("p, li, td, th, a, summary, .grade, .state")];
        const drawn = [...document.querySelectorAll("svg text")];
        return [
          ...texts.filter((e) => contrast(getComputedStyle(e).color) < 4.5),
          ...drawn.filter((e) => contrast(getComputedStyle(e).fill) < 4.5),
        ].map((e) => e.textContent.trim());
        }"""
    )
    assert low == []


def test_the_filter_by_keyboard(page: Page) -> None:
    rows = page.locator("#requests-table tbody tr:visible")
    everything = rows.count()
    page.locator("#filter [name=text]").focus()
    page.keyboard.type("kvw-A")
    assert rows.count() == 19
    assert page.inner_text("#filter output") == f"shown: 19 / {everything}"
    page.keyboard.press("Enter")
    assert rows.count() == 19
    page.locator("#filter [name=text]").fill("")
    page.keyboard.press("Tab")
    page.keyboard.type("C")
    assert page.locator("#filter [name=series]").input_value() == "C"
    assert rows.count() == 1
    page.locator("#filter [name=series]").select_option("")
    page.locator("#filter [name=grade]").select_option("recomputed")
    assert 0 < rows.count() < everything


def test_the_first_tab_leads_to_the_claim(page: Page) -> None:
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.getAttribute('href')") == "#claim"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "claim"


def test_print_fits_the_paper_and_shows_what_is_folded(page: Page) -> None:
    page.set_viewport_size({"width": 720, "height": 1000})
    page.emulate_media(media="print")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.locator("#residency-table").is_visible()
    assert not page.locator("#filter").is_visible()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.locator("details[open]").count() == 0


def test_charts_are_named_for_screen_readers(page: Page) -> None:
    for name in ("Which prefix was in L1 and in L2 when", "Time to the first token by series"):
        assert page.get_by_role("img", name=name).count() == 1
