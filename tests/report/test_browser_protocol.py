"""The report about the full protocol with its control, in a real browser."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page

from .browsers import opened, too_pale
from .pages import html_of
from .protocol_run import GPU_RUN, protocol_bundle
from .runs import bundle_of
from .test_breakeven import times

pytestmark = pytest.mark.browser

LOOKS = [(1280, "light"), (400, "light"), (1280, "dark"), (400, "dark")]


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The pages of the protocol in both languages, of that on a GPU, and of a sweep."""
    folder = tmp_path_factory.mktemp("reports")
    bundle = protocol_bundle(folder / "bundle", folder / "journals")
    gpu = protocol_bundle(folder / "gpu", folder / "gpu-journals", GPU_RUN)
    sweep = bundle_of(folder / "sweep", times((10, 5, -5, -40)), journals=())
    pages = {"en": html_of(bundle), "ru": html_of(bundle, "ru"), "gpu": html_of(gpu), "sweep": html_of(sweep)}
    for name, html in pages.items():
        (folder / f"{name}.html").write_text(html, "utf-8")
    return {name: folder / f"{name}.html" for name in pages}


@pytest.fixture(params=LOOKS, ids=lambda look: f"{look[0]}-{look[1]}")
def page(request: pytest.FixtureRequest, browser: Browser, reports: dict[str, Path]) -> Iterator[Page]:
    with opened(browser, reports["en"], *request.param) as found:
        yield found


@pytest.fixture(params=LOOKS, ids=lambda look: f"{look[0]}-{look[1]}")
def gpu(request: pytest.FixtureRequest, browser: Browser, reports: dict[str, Path]) -> Iterator[Page]:
    with opened(browser, reports["gpu"], *request.param) as found:
        yield found


@pytest.fixture(params=LOOKS, ids=lambda look: f"{look[0]}-{look[1]}")
def sweep(request: pytest.FixtureRequest, browser: Browser, reports: dict[str, Path]) -> Iterator[Page]:
    with opened(browser, reports["sweep"], *request.param) as found:
        yield found


def test_every_claim_chart_and_table_is_there(page: Page) -> None:
    all_is_there(page)


def test_a_run_on_a_gpu(gpu: Page) -> None:
    all_is_there(gpu)
    assert "11968 prompt tokens each" in gpu.inner_text("#claim")
    assert "NVIDIA H200" in (gpu.text_content("#conditions") or "")


def all_is_there(page: Page) -> None:
    claim = page.inner_text("#claim")
    assert "confirmed for 20 of 20 requests of series C" in claim
    assert "controlled: the same load without HiCache recomputed what C reused" in claim
    assert "Grade: confirmed, controlled" in claim
    assert "the tokens of 20 of 20 requests of C equal those of A" in claim
    assert "recomputed what C reused: 20 of 20 requests" in page.inner_text("#control")
    assert page.locator("#chain li.holds").count() >= 7 and page.locator("#chain li.missing").count() == 0
    for chart in ("#residency svg", "#timing svg"):
        box = page.locator(chart).bounding_box()
        assert box is not None and box["width"] >= 600 and box["height"] > 100
    for table in ("timing", "difference", "control", "answers", "requests", "witnesses"):
        assert page.locator(f"#{table}-table").is_visible()
    for row in page.locator("#timing-table tbody tr").all()[1:3]:
        assert row.locator("td").first.inner_text() == "20"
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.locator(".scroll:not([tabindex='0'])").count() == 0
    assert too_pale(page) == []


def test_the_chart_shows_one_round(page: Page) -> None:
    labels = [label.strip() for label in page.locator("#residency svg text").all_text_contents()]
    assert sorted(label for label in labels if label in ("A", "B", "C")) == ["A", "B", "C"]


def test_the_contents_lead_to_every_section(page: Page) -> None:
    links = [link.get_attribute("href") or "" for link in page.locator("nav a").all()]
    assert "#control" in links and "#answers" in links and "#sweep" not in links
    for link in links:
        assert page.locator(f"section{link} h2").count() == 1


def test_the_conditions_have_every_argument(page: Page) -> None:
    page.locator("#conditions details summary", has_text="Every argument of the server").click()
    table = page.locator("#conditions table.settings", has_text="hicache_write_policy")
    assert "write_through" in table.first.inner_text()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_a_sweep_has_its_answer_its_chart_and_its_table(sweep: Page) -> None:
    text = sweep.inner_text("#sweep")
    assert "An L2 read pays from a prefix of about 384 tokens on (95% interval: " in text
    assert sweep.get_by_role("img", name="Time to the first token by prefix length").count() == 1
    assert sweep.locator("#sweep-table tbody tr").count() == 4
    assert sweep.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert too_pale(sweep) == []


def test_the_same_in_russian(browser: Browser, reports: dict[str, Path]) -> None:
    with opened(browser, reports["ru"], 1280, "light") as page:
        assert "с контролем" in page.inner_text("#claim")
        assert "20 из 20 запросов" in page.inner_text("#control")
