"""The charts: matplotlib's SVG, made fit to stand in a page.

Colours become the page's own variables, so that a chart follows the light and the dark theme and print; texts stay
texts; ids are the chart's own; and each chart carries a title and a description.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final
from xml.etree import ElementTree

from matplotlib import style
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from kvwitness.tracer.report.breakeven import COLD, L1, L2, BreakEven, Point
from kvwitness.tracer.report.messages import Words
from kvwitness.tracer.report.residency import Lane, Residencies, Stay, was_evicted
from kvwitness.tracer.report.statistics import Summary

_INK: Final = "#010101"
_MUTED: Final = "#020202"
_GRID: Final = "#030303"
_L1: Final = "#040404"
_L2: Final = "#050505"
_MARK: Final = "#060606"
_VARIABLES: Final = {
    _INK: "--ink",
    _MUTED: "--muted",
    _GRID: "--line",
    _L1: "--l1",
    _L2: "--l2",
    _MARK: "--bad",
}

_SVG: Final = "http://www.w3.org/2000/svg"
_XLINK: Final = "http://www.w3.org/1999/xlink"
_REFERENCE = re.compile(r"url\(#([^)]+)\)")
_COLOUR = re.compile("|".join(_VARIABLES))
_LABEL_CHARS: Final = 26

_STYLE: Final[dict[Any, Any]] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "kvwitness",
    "text.parse_math": False,
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 10,
    "text.color": _INK,
    "axes.edgecolor": _GRID,
    "axes.labelcolor": _MUTED,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.grid.axis": "x",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.axisbelow": True,
    "grid.color": _GRID,
    "grid.linewidth": 0.6,
    "xtick.color": _MUTED,
    "ytick.color": _GRID,
    "ytick.labelcolor": _INK,
    "ytick.left": False,
    "legend.frameon": False,
    "figure.facecolor": "none",
    "savefig.facecolor": "none",
}

_PATHS: Final[dict[str, dict[str, Any]]] = {
    COLD: {"color": _INK, "linestyle": "--", "marker": "s", "markersize": 5, "linewidth": 1.4},
    L1: {"color": _L1, "linestyle": "-", "marker": "o", "markersize": 5, "linewidth": 1.4},
    L2: {"color": _L2, "linestyle": "-", "marker": "^", "markersize": 6, "linewidth": 1.4},
}
"""Told apart by line and mark as well as by colour."""
_DOT: Final[dict[str, Any]] = {
    "linestyle": "none",
    "marker": "o",
    "markersize": 5,
    "markerfacecolor": _L1,
    "markeredgewidth": 0,
    "alpha": 0.6,
}
_MEDIAN: Final[dict[str, Any]] = {"linestyle": "none", "marker": "|", "markersize": 16, "color": _INK}
_INTERVAL: Final[dict[str, Any]] = {"linewidth": 3, "marker": "|", "markersize": 8, "color": _L2}
"""Short lines at both ends: an interval narrower than a stroke still shows."""


def residency_chart(found: Residencies, words: Words) -> str:
    """Prefixes from top to bottom, each with a row for L1 and one for L2; time from left to right."""
    lanes = found.drawn
    # A little beyond the record's end, so that a stay that began with its last events shows.
    edge = found.end + 0.02 * (found.end - found.begin) or 1
    with _figure(9.2, 1.15 + 0.62 * len(lanes)) as (figure, axes):
        for index, lane in enumerate(lanes):
            _draw_lane(axes, lane, index, edge, found.begin)
        for at in found.resets:
            axes.axvline(at, color=_MARK, linewidth=1, linestyle="--")
        for marker in found.markers:
            axes.axvline(marker.at, color=_INK, linewidth=0.9, linestyle=":")
            axes.annotate(
                _label(marker.series),
                (marker.at, 1.0),
                xycoords=("data", "axes fraction"),
                xytext=(0, 3),
                textcoords="offset points",
                ha="center",
                fontweight="bold",
            )
        axes.set_yticks(range(len(lanes)), [_label(f"{lane.series} {lane.owner}".strip()) for lane in lanes])
        axes.set_ylim(len(lanes) - 0.5, -0.5)
        axes.set_xlim(found.begin, edge)
        axes.set_xlabel(words("residency.axis"))
        marks = [
            Patch(facecolor=_L1, label=words("residency.in_l1")),
            Patch(facecolor=_L2, label=words("residency.in_l2")),
            Line2D([], [], color=_MARK, marker="x", linestyle="none", label=words("residency.left")),
        ]
        _legend(figure, marks)
        description = words("residency.description", lanes=len(lanes), stays=found.stays, instance=found.instance)
        return _page_svg(figure, "residency", words("residency.title"), description)


def ttft_chart(summaries: Sequence[Summary], words: Words) -> str:
    """One row per series: a dot per request, the median, and its interval where there is one."""
    with _figure(9.2, 1.25 + 0.5 * len(summaries)) as (figure, axes):
        for row, summary in enumerate(summaries):
            axes.plot(summary.samples, [row - 0.1] * summary.count, **_DOT)
            axes.plot([summary.median], [row], **_MEDIAN)
            if summary.interval is not None:
                axes.plot([summary.interval.low, summary.interval.high], [row + 0.22] * 2, **_INTERVAL)
        axes.set_yticks(range(len(summaries)), [_label(f"{one.series} ({one.count})") for one in summaries])
        axes.set_ylim(len(summaries) - 0.4, -0.6)
        axes.set_xlim(left=0)
        axes.set_xlabel(words("timing.axis"))
        marks = [
            Line2D([], [], **_DOT, label=words("timing.request")),
            Line2D([], [], **_MEDIAN, label=words("timing.median")),
        ]
        if any(summary.interval for summary in summaries):
            marks.append(Line2D([0, 1], [0, 0], **_INTERVAL, label=words("timing.interval")))
        _legend(figure, marks)
        told = "; ".join(f"{one.series}: {one.median:.1f} ms" for one in summaries)
        return _page_svg(figure, "ttft", words("timing.title"), words("timing.description", medians=told))


def sweep_chart(found: BreakEven, words: Words) -> str:
    """Medians with their intervals over the prefix length, a line per path."""
    names = {COLD: words("sweep.cold"), L1: L1, L2: L2}
    with _figure(9.2, 4.2) as (figure, axes):
        for path, looks in _PATHS.items():
            summaries = [(point.length, one) for point in found.points if (one := _of_path(point, path)) is not None]
            lengths = [length for length, _ in summaries]
            medians = [one.median for _, one in summaries]
            axes.plot(lengths, medians, label=names[path], **looks)
            for length, one in summaries:
                if one.interval is not None:
                    ends = [one.interval.low, one.interval.high]
                    axes.plot([length, length], ends, color=looks["color"], linewidth=1.2, marker="_", markersize=7)
        if found.length is not None:
            axes.axvline(found.length, color=_MUTED, linewidth=1, linestyle=":")
        axes.set_xscale("log", base=2)
        axes.set_xticks([point.length for point in found.points], [str(point.length) for point in found.points])
        axes.minorticks_off()
        axes.grid(True, axis="y")
        axes.tick_params(axis="y", labelcolor=_MUTED)
        axes.set_ylim(bottom=0)
        axes.set_xlabel(words("sweep.axis_length"))
        axes.set_ylabel(words("sweep.axis_time"))
        _legend(figure, axes.get_legend_handles_labels()[0])
        told = "; ".join(
            f"{point.length}: "
            + ", ".join(f"{names[p]} {one.median:.1f} ms" for p in _PATHS if (one := _of_path(point, p)))
            for point in found.points
        )
        return _page_svg(figure, "sweep-chart", words("sweep.title"), words("sweep.description", medians=told))


def _of_path(point: Point, path: str) -> Summary | None:
    return {COLD: point.cold, L1: point.l1, L2: point.l2}[path]


def _draw_lane(axes: Axes, lane: Lane, index: int, edge: float, begin: float) -> None:
    for stay in lane.stays:
        # Within its row, a stay stands at the height of its tokens: the prefix's start is on top.
        top = index - 0.38 if stay.tier == "L1" else index + 0.03
        room = 0.35 / lane.tokens
        until = edge if stay.until is None else min(stay.until, edge)
        since = max(stay.since, begin)
        height = max(room * (stay.end - stay.start), 0.03)
        axes.broken_barh(
            [(since, until - since)],
            (top + room * stay.start, height),
            facecolors=_L1 if stay.tier == "L1" else _L2,
            linewidth=0,
        )
        if was_evicted(stay) and (stay.until or 0) <= edge:
            _mark(axes, stay, top + room * stay.start + height / 2)


def _mark(axes: Axes, stay: Stay, y: float) -> None:
    axes.plot([stay.until or 0], [y], color=_MARK, marker="x", markersize=7, markeredgewidth=1.8, linestyle="none")


def _legend(figure: Figure, marks: Iterable[Artist]) -> None:
    figure.legend(handles=list(marks), loc="outside lower center", ncols=3)


def _label(text: str) -> str:
    """Text from outside, short and printable."""
    clean = "".join(char if char.isprintable() else "�" for char in text)
    return clean if len(clean) <= _LABEL_CHARS else f"{clean[:11]}…{clean[-14:]}"


@contextmanager
def _figure(width: float, height: float) -> Iterator[tuple[Figure, Axes]]:
    # On top of the defaults: what a user has set for matplotlib must not change the page.
    with style.context(["default", _STYLE]):
        figure = Figure(figsize=(width, height), layout="constrained")
        yield figure, figure.add_subplot()


def _page_svg(figure: Figure, name: str, title: str, description: str) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    root = ElementTree.fromstring(buffer.getvalue())
    for unwanted in root.findall(f"{{{_SVG}}}metadata"):
        root.remove(unwanted)
    for definitions in root.findall(f"{{{_SVG}}}defs"):
        # Its rules are for every element, and in a page that means the whole page.
        for rules in definitions.findall(f"{{{_SVG}}}style"):
            definitions.remove(rules)
    for element in root.iter():
        for key, value in element.attrib.items():
            element.set(key, _fit(key, value, name))
    for key in ("width", "height"):
        root.attrib.pop(key, None)
    root.set("role", "img")
    root.set("aria-labelledby", f"{name}-title {name}-description")
    for tag, key, text in (("desc", "description", description), ("title", "title", title)):
        element = ElementTree.Element(f"{{{_SVG}}}{tag}", {"id": f"{name}-{key}"})
        element.text = text
        root.insert(0, element)
    ElementTree.register_namespace("", _SVG)
    ElementTree.register_namespace("xlink", _XLINK)
    return ElementTree.tostring(root, encoding="unicode")


def _fit(key: str, value: str, name: str) -> str:
    if key == "id":
        return f"{name}-{value}"
    if key == f"{{{_XLINK}}}href":
        return value.replace("#", f"#{name}-", 1)
    value = _REFERENCE.sub(rf"url(#{name}-\1)", value)
    return _COLOUR.sub(lambda match: f"var({_VARIABLES[match[0]]})", value)
