"""The page in a real browser: nothing leaves it, nothing is wrong on it, and it works without a mouse."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page

from .browsers import opened, too_pale
from .pages import html_of
from .runs import abc_records, bundle_of, record

pytestmark = pytest.mark.browser


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
    with opened(browser, report, *request.param) as found:
        yield found


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
    assert too_pale(page) == []


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
