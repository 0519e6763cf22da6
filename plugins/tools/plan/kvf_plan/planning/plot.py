"""A plan as a picture: the curve of LRU, and what settings cost and do. Drawn by matplotlib, imported when needed;
needs no display."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING

from kvf_plan.errors import PlanError
from kvf_plan.planning.goal import Row
from kvf_plan.planning.plan import Plan
from kvframework.api.installing import install_command

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ENDINGS = (".png", ".svg")
_GIB = 1 << 30
_DPI = 120


def check_plot(file: Path) -> None:
    """Check before any work that `file` can be drawn. Raises `PlanError`."""
    where = f"--plot {file}"
    if file.suffix.lower() not in ENDINGS:
        raise PlanError(
            f"a plot is no {file.suffix or 'file without ending'}", where=where, available=", ".join(ENDINGS)
        )
    if not os.access(file.parent, os.W_OK | os.X_OK) or file.is_dir():
        raise PlanError("the plot cannot be written there", where=where)
    if importlib.util.find_spec("matplotlib") is None:
        raise PlanError(
            "not installed: matplotlib", where=where, hint=install_command("plot", distribution="kvframework-plan")
        )


def draw(plan: Plan, file: Path) -> None:
    """Overwrite `file`. Raises `PlanError` as `check_plot` does, and if it cannot be written after all."""
    check_plot(file)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12.4, 4.8), layout="constrained")
    engine = plan.engine
    figure.suptitle(
        f"{plan.trace}: {plan.requests:,} requests; {plan.engines} x {engine.words}",
        fontsize=10,
    )
    curve, rows = figure.subplots(1, 2)
    _curve(curve, plan)
    _rows(rows, plan)
    try:
        figure.savefig(file, dpi=_DPI)
    except OSError as error:
        raise PlanError(f"the plot cannot be written: {error.strerror}", where=f"--plot {file}") from error


def _curve(axes: Axes, plan: Plan) -> None:
    for index, chunks in enumerate(plan.chunks):
        colour = f"C{index}"
        xs = [point.l1_bytes / _GIB for point in chunks.curve]
        axes.plot(xs, [100 * point.hit for point in chunks.curve], color=colour, label=f"{chunks.chunk_tokens} tokens")
        axes.axhline(100 * chunks.endless_hit, color=colour, linestyle=":", linewidth=1)
        axes.axvline(chunks.live_bytes / _GIB, color=colour, linestyle="--", linewidth=1)
    axes.set(
        title="LRU without a tier; dotted: endless; dashed: live set", xlabel="L1, GiB", ylabel="% of tokens found"
    )
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _at: f"{value:g}")
    axes.set_ylim(bottom=0)
    axes.grid(visible=True, alpha=0.25)
    axes.legend(title="chunk", fontsize=8)


def _rows(axes: Axes, plan: Plan) -> None:
    kinds: dict[str, list[Row]] = {}
    for row in plan.rows:
        setting = row.setting
        kind = f"{setting.tier.name}, {setting.write_policy}" if setting.tier is not None else "no tier"
        kinds.setdefault(kind, []).append(row)
    for index, (kind, rows) in enumerate(kinds.items()):
        xs, ys = [row.figures.cost for row in rows], [row.figures.ttft_s[plan.goal.at] for row in rows]
        faces = ["none" if row.sampled else f"C{index}" for row in rows]
        axes.scatter(xs, ys, edgecolors=f"C{index}", facecolors=faces, label=kind, s=24)
    if plan.chosen is not None:
        chosen = plan.chosen.figures
        axes.scatter([chosen.cost], [chosen.ttft_s[plan.goal.at]], s=140, facecolors="none", edgecolors="C3")
    if plan.goal.ttft_s is not None:
        axes.axhline(plan.goal.ttft_s, color="C3", linewidth=1, label="goal")
    unit = "GiB of DRAM, prices assumed" if plan.prices.assumed else "in the unit of --price"
    axes.set(
        title="settings; hollow: of a part of the sessions",
        xlabel=f"cost, {unit}",
        ylabel=f"{plan.goal.at} time to first token, s",
        yscale="log",
    )
    axes.yaxis.set_major_formatter(lambda value, _at: f"{value:g}")
    axes.yaxis.set_minor_formatter(lambda value, _at: f"{value:g}")
    axes.grid(visible=True, which="both", alpha=0.25)
    axes.legend(fontsize=8)
