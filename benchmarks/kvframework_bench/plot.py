"""Panels drawn into a file by matplotlib, which is imported when something is drawn. Needs no display.

Called from the thread that runs the benchmark.
"""

from __future__ import annotations

import importlib.util
import os
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvframework.api.installing import install_command
from kvframework.text import short_number
from kvframework_bench.document import Document
from kvframework_bench.errors import BenchUnavailable
from kvframework_bench.panels import Bars, Lines, Panel, panels
from kvframework_bench.tables import headline, warning

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ENDINGS = (".png", ".svg")
_PANEL_INCHES = (5.6, 4.0)
_TITLE_INCHES = 0.9
_COLUMNS = 2
_BAR_INCHES = 0.27
_DPI = 120
_FIXED = {"": "C0", "kvframework": "C0", "reference": "0.7"}
# Who prefers a dark page gets the light picture inverted, its hues turned back.
_DARK = "@media (prefers-color-scheme: dark) { svg { filter: invert(0.88) hue-rotate(180deg) } }"


def check_plot(file: Path) -> None:
    """Check before any measurement that `file` can be written. Raises `BenchUnavailable`."""
    if file.suffix.lower() not in ENDINGS:
        raise BenchUnavailable(
            f"a plot cannot be written as {file.suffix or 'a file without ending'}",
            where=f"--plot {file}",
            available=", ".join(ENDINGS),
        )
    if (
        not os.access(file.parent, os.W_OK | os.X_OK)
        or file.is_dir()
        or (file.exists() and not os.access(file, os.W_OK))
    ):
        raise BenchUnavailable("the plot file cannot be written", where=f"--plot {file}")
    if importlib.util.find_spec("matplotlib") is None:
        raise BenchUnavailable(
            "matplotlib is not installed",
            where=f"--plot {file}",
            hint=install_command("plot", distribution="kvframework-bench"),
        )


def write_plot(document: Document, file: Path) -> None:
    """Draw the panels of a document. Raises the errors of `draw`."""
    about = headline(document)
    if warnings := warning(document):
        about += f" ({warnings})"
    draw(panels(document.figures), file, title=f"kvframework bench {document.bench}", about=about)


def draw(made: Sequence[Panel], file: Path, *, title: str, about: str) -> None:
    """Draw panels row by row under a title and a description of machine and versions. Overwrites `file`.

    Raises `BenchUnavailable` as `check_plot` does, and if it cannot be written after all.
    """
    check_plot(file)
    from matplotlib.figure import Figure

    columns = max(min(_COLUMNS, len(made)), 1)
    rows = [made[at : at + columns] for at in range(0, len(made), columns)]
    heights = [max(_height(panel) for panel in row) for row in rows]
    width = max(_PANEL_INCHES[0] * columns, 8.0)
    figure = Figure(figsize=(width, sum(heights) + _TITLE_INCHES), layout="constrained")
    figure.suptitle(title + "\n" + "\n".join(textwrap.wrap(about, round(width * 13))), fontsize=10)
    if rows:
        grid = figure.add_gridspec(len(rows), columns, height_ratios=heights)
        for row, of_row in enumerate(rows):
            for column, panel in enumerate(of_row):
                axes = figure.add_subplot(grid[row, column])
                if isinstance(panel, Lines):
                    _lines(axes, panel)
                else:
                    _bars(axes, panel)
    try:
        figure.savefig(file, dpi=_DPI)
        if file.suffix.lower() == ".svg":
            file.write_text(file.read_text().replace("</style>", f"{_DARK}</style>", 1))
    except OSError as error:
        raise BenchUnavailable(f"the plot cannot be written: {error.strerror}", where=f"--plot {file}") from error


def _height(panel: Panel) -> float:
    return _PANEL_INCHES[1] if isinstance(panel, Lines) else max(2.4, 1.2 + _BAR_INCHES * len(panel.bars))


def _lines(axes: Axes, panel: Lines) -> None:
    colours: dict[str, str] = {}
    for line in panel.lines:
        colour = colours.setdefault(line.like or line.name, f"C{len(colours)}")
        axes.plot(
            line.xs,
            line.ys,
            label=line.name,
            color=colour,
            marker="o",
            markersize=4,
            linestyle="--" if line.dashed else "-",
        )
    axes.set(title=panel.title, xlabel=panel.x, ylabel=panel.y, xscale="log", yscale="log")
    steps = sorted({x for line in panel.lines for x in line.xs})
    axes.set_xticks(steps, [_number(step) for step in steps])
    axes.set_xticks([], minor=True)
    ys = [y for line in panel.lines for y in line.ys]
    axes.yaxis.set_major_formatter(lambda value, _at: _number(value))
    # Where the axis spans less than two powers of ten, those alone would be one number or none.
    crowded = max(ys) > 20 * min(ys)
    axes.yaxis.set_minor_formatter(lambda value, _at: "" if crowded else _number(value))
    axes.grid(visible=True, which="both", alpha=0.25)
    axes.margins(y=0.2)  # room for the legend
    axes.legend(fontsize=8, ncols=2)


def _bars(axes: Axes, panel: Bars) -> None:
    places = range(len(panel.bars))
    values = [bar.value for bar in panel.bars]
    ranges = ([bar.value - bar.low for bar in panel.bars], [bar.high - bar.value for bar in panel.bars])
    ranged = any(map(sum, ranges))
    kinds = dict.fromkeys(bar.kind for bar in panel.bars if bar.kind not in _FIXED)
    colours = _FIXED | {kind: f"C{index}" for index, kind in enumerate(kinds, 1)}
    drawn = axes.barh(
        places,
        values,
        xerr=ranges if ranged else None,
        height=0.7,
        color=[colours[bar.kind] for bar in panel.bars],
        ecolor="0.35",
        capsize=2,
    )
    axes.bar_label(drawn, [_figure(bar.value) for bar in panel.bars], padding=3, fontsize=8)
    axes.margins(x=0.17)
    for place, bar in zip(places, panel.bars, strict=True):
        if bar.target_ratio is not None:
            axes.plot([bar.target_ratio] * 2, [place - 0.42, place + 0.42], color="C3", linewidth=2.5)
    if any(bar.target_ratio is not None for bar in panel.bars):
        axes.plot([], [], color="C3", linewidth=2.5, label="target")
        axes.legend(fontsize=8)
    if panel.log:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(lambda value, _at: _number(value))
        # Where the axis spans less than two powers of ten, those alone would be one number or none.
        crowded = max(bar.high for bar in panel.bars) > 20 * min(bar.low for bar in panel.bars)
        axes.xaxis.set_minor_formatter(lambda value, _at: "" if crowded else _number(value))
        axes.tick_params(axis="x", which="minor", labelsize=7)
    axes.set_yticks(places, [bar.name for bar in panel.bars], fontsize=9)
    axes.invert_yaxis()
    axes.set(title=panel.title, xlabel=panel.unit)
    axes.grid(visible=True, axis="x", alpha=0.25)


def _figure(value: float) -> str:
    """Three digits, as tables have."""
    return f"{value:,.0f}" if value >= 100 else short_number(value)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1 else short_number(value)
