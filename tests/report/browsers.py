"""A page in a real browser, watched for everything that must not happen on it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser, Page


@contextmanager
def opened(browser: Browser, report: Path, width: int, scheme: str) -> Iterator[Page]:
    """The page at ``report``; afterwards nothing was asked of the network and nothing was said on the console."""
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)  # type: ignore[arg-type]
    found = context.new_page()
    wrong: list[str] = []
    found.on("console", lambda message: wrong.append(message.text))
    found.on("pageerror", lambda error: wrong.append(str(error)))
    found.on("request", lambda asked: wrong.append(asked.url) if asked.url != report.as_uri() else None)
    found.goto(report.as_uri())
    yield found
    assert wrong == []
    context.close()


def too_pale(page: Page) -> list[str]:
    """Texts that stand out from the paper less than WCAG asks (4.5), on the page and in its charts."""
    found: list[str] = page.evaluate(
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
    return found
