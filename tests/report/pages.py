"""Take a page apart: its texts by section, its tables, everything that could load something."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

from kvwitness.tracer.report.load import load_evidence
from kvwitness.tracer.report.messages import words_for
from kvwitness.tracer.report.page import build_page
from kvwitness.tracer.report.render import render_html, render_markdown

VOID = {"meta", "link", "input", "br", "hr", "img"}
LOADING = {"src", "srcset", "href", "action", "data", "poster", "xlink:href"}


class Parsed(HTMLParser):
    """Texts by the id of the section around them, tables by id, and what an attacker would want."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.sections: dict[str, str] = {}
        self.tables: dict[str, list[list[str]]] = {}
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.scripts: list[str] = []
        self.ids: list[str] = []
        self.unclosed: list[str] = []
        self._section = self._table = ""
        self._stack: list[str] = []
        self.feed(html)
        self.close()
        self.unclosed = self._stack

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {key: value or "" for key, value in attrs}
        self.tags.append((tag, values))
        if "id" in values:
            self.ids.append(values["id"])
        if tag not in VOID:
            self._stack.append(tag)
        if tag == "section" or values.get("class") == "alarm":
            self._section = values.get("id", "alarm")
        elif tag == "table":
            self._table = values.get("id", "")
            self.tables.setdefault(self._table, [])
        elif tag == "tr":
            self.tables[self._table].append([])
        elif tag in ("td", "th"):
            self.tables[self._table][-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._stack.pop() == tag
        if tag in ("section", "header"):
            self._section = ""

    def handle_data(self, data: str) -> None:
        if self._stack and self._stack[-1] == "script":
            self.scripts.append(data)
            return
        self.sections[self._section] = self.sections.get(self._section, "") + data
        if any(tag in self._stack for tag in ("td", "th")):
            self.tables[self._table][-1][-1] += data

    def text(self, section: str) -> str:
        return " ".join(self.sections.get(section, "").split())

    def references(self) -> list[str]:
        """What attributes point to outside the page."""
        found = [values[key] for _, values in self.tags for key in LOADING if key in values]
        return [one for one in found if one and not one.startswith("#") and one != "data:,"]


def html_of(path: Path, language: str = "en") -> str:
    words = words_for(language)
    return render_html(build_page(load_evidence(path), words), words)


def page_of(path: Path, language: str = "en") -> Parsed:
    return Parsed(html_of(path, language))


def markdown_of(path: Path, language: str = "en") -> str:
    words = words_for(language)
    return render_markdown(build_page(load_evidence(path), words), words)
