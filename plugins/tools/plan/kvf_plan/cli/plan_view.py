"""What `kvframework plan` prints, in 100 columns: the engine and its source, the live set, LRU's curve, the settings,
the choice, its TOML last; and the file that `--out` writes."""

from __future__ import annotations

import os
import textwrap
from pathlib import Path

from rich.table import Table

from kvf_plan.cli.simulate_view import table_of
from kvf_plan.errors import PlanError
from kvf_plan.planning.catalogue import Engine, catalogue
from kvf_plan.planning.goal import MOST_BUSY, MOST_DROPPED, Row, Shortfall, closest, shortfalls, toml_of
from kvf_plan.planning.offers import TierOffer
from kvf_plan.planning.plan import Chunks, Plan
from kvframework import __version__
from kvframework.api.console import print_document, print_text, print_view, stderr
from kvframework.api.plugin import ByteSize
from kvframework.text import short_count, short_duration, short_number

_LIMITS = {"ttft": "time to the first token", "budget": "cost", "drive_writes": "writes of the whole tier per day"}


def print_plan(plan: Plan, *, as_json: bool) -> None:
    if as_json:
        print_document(plan)
        return
    _print(_load(plan), _speed(plan.engine), "", _needs(plan.chunks))
    print_view(_curve(plan.chunks))
    print_view(_rows(plan))
    print_text("")
    for name, (tier, l2_bytes) in _tiers(plan).items():
        write = f", writes {_rate(tier.write_bytes_per_s)}" if tier.write_bytes_per_s is not None else ""
        _print(f"{name}: reads {_rate(tier.read_bytes_per_s)}{write}, {ByteSize(l2_bytes)}")
    if any(row.figures.saturated for row in plan.rows):
        _print(
            f"* saturated, so never chosen: the tier is busy more than {MOST_BUSY:.0%} of the time, or too slow for "
            f"more than {MOST_DROPPED:.0%} of the writes at commit"
        )
    if not plan.says_a_day and _tiers(plan):
        _print(f"{short_duration(plan.seconds)} of trace are too short to estimate writes per day")
    if plan.prices.assumed:
        prices = ", ".join(f"{name} {short_number(price)}" for name, price in plan.prices.of.items())
        _print(f"cost is in GiB of DRAM, at assumed prices per GiB ({prices}); set yours with --price")
    _print("", *verdict(plan))
    if plan.chosen is not None:
        toml = toml_of(plan.chosen.setting).splitlines()
        _print("", *(line for line in toml if not line.startswith("#")))


def _print(*lines: str) -> None:
    for line in lines:
        print_text("\n".join(textwrap.wrap(line, 100, break_long_words=False, break_on_hyphens=False)))


def print_catalogue(*, as_json: bool) -> None:
    known = catalogue()
    if as_json:
        print_document(known)
        return
    sources: dict[str, int] = {}
    models = table_of("model", "KV of a token", "A, tokens", "active parameters", "source")
    for name, model in known.models.items():
        size, a = str(ByteSize(model.bytes_per_token)), f"{model.attention_tokens:,.0f}"
        number = sources.setdefault(model.source, len(sources) + 1)
        models.add_row(name, size, a, short_count(model.active_parameters), str(number))
    speeds = table_of("model", "GPUs", "tokens/s", "at prompts of", "basis", "source", text=(4,))
    for each in known.speeds:
        at = f"{each.prompt_tokens:,}" if each.prompt_tokens else ""
        said = "; ".join(part for part in (each.note, each.source) if part)
        number = sources.setdefault(said, len(sources) + 1)
        speeds.add_row(
            each.model, f"{each.gpus} x {each.gpu}", f"{each.tokens_per_s:,.0f}", at, each.basis, str(number)
        )
    print_view(models)
    print_view(speeds)
    for said, number in sources.items():
        print_text(f"{number}: {said}")
    print_text(
        f"other speeds are assumed: {known.assumed.dense:.0%} of the peak of a GPU for dense models, "
        f"{known.assumed.mixture:.0%} for mixtures of experts; GPUs: {', '.join(known.gpus)}"
    )


def verdict(plan: Plan) -> list[str]:
    """Return what to take, or which limit nothing keeps, by how much, and what comes closest."""
    goal = plan.goal
    if goal.ttft_s is None:
        return ["no goal is set, so no row is chosen; set a goal with --ttft TIME"]
    if plan.chosen is not None:
        return [f"chosen, the cheapest that meets the goal: {_said(plan.chosen)}", *_wear(plan)]
    row = closest(plan.rows, goal)
    lines = ["no tried configuration meets the goal, so none is chosen"]
    if any(each.figures.saturated and not shortfalls(each, goal) for each in plan.rows):
        lines.append("a saturated tier would meet the goal: give a faster tier, or one with fewer writes")
    lines += [_short(each, goal.at) for each in shortfalls(row, goal)]
    return [*lines, f"the closest configuration: {_said(row)}"]


def _wear(plan: Plan) -> list[str]:
    assert plan.chosen is not None
    times = plan.chosen.figures.drive_writes
    if times < 1 or plan.goal.drive_writes is not None or not plan.says_a_day:
        return []
    often = f"the tier would be written {short_number(times)} times its size per day"
    return [f"{often}: see the disk's datasheet for the allowed number; --drive-writes N sets a limit"]


def _short(short: Shortfall, at: str) -> str:
    unit = " s" if short.limit == "ttft" else ""
    name = f"{at} {_LIMITS[short.limit]}" if short.limit == "ttft" else _LIMITS[short.limit]
    over = f", {short.over:.0%} over" if short.wanted else ""
    return f"{name}: at best {short_number(short.has)}{unit}, not {short_number(short.wanted)}{unit}{over}"


def _said(row: Row) -> str:
    setting, figures = row.setting, row.figures
    tier = f", {ByteSize(setting.l2_bytes)} of {setting.tier.name} by {setting.write_policy}" if setting.tier else ""
    return (
        f"{ByteSize(setting.l1_bytes)} of L1 by {setting.eviction}{tier}, chunks of {setting.chunk_tokens} tokens: "
        f"mean {short_number(figures.ttft_s['mean'])} s, cost {short_number(figures.cost)}"
    )


def _load(plan: Plan) -> str:
    rate = plan.requests / max(plan.seconds, 1.0)
    why = " (the number that the trace needs without a cache)" if plan.engines_by_load else ""
    engines = "1 engine" if plan.engines == 1 else f"{plan.engines} engines"
    return (
        f"{plan.trace}: {plan.requests:,} requests in {short_duration(plan.seconds)}, {short_number(rate)} per second, "
        f"{plan.tokens / max(plan.requests, 1):,.0f} tokens each; {engines}{why}"
    )


def _speed(engine: Engine) -> str:
    source = f"; {engine.source}" if engine.source else ""
    twice = f"half as many at {engine.attention_tokens:,.0f} tokens of context"
    context = twice if engine.attention_tokens else "at any length of context"
    return (
        f"{engine.words}: {engine.tokens_per_s:,.0f} tokens of prompts/s, {context}; "
        f"{ByteSize(engine.bytes_per_token)} of KV per token ({engine.basis}: {engine.note}{source})"
    )


def _needs(chunks: Chunks) -> str:
    live = chunks.live
    return (
        f"chunks of {chunks.chunk_tokens} tokens: the live set is {ByteSize(chunks.live_bytes)} ({live.most:,} chunks "
        f"at one time that later requests use); {ByteSize(chunks.all_bytes)} were computed in all, "
        f"{live.reused / max(live.stored, 1):.0%} of them are used again; the longest prompt has "
        f"{ByteSize(chunks.longest_bytes)}; an endless cache finds {chunks.endless_hit:.1%} of all tokens"
    )


def _curve(chunks: Chunks) -> Table:
    table = table_of("L1, LRU alone", "tokens found", "mean TTFT, estimated", "p99")
    for point in chunks.curve:
        mean, p99 = short_number(point.ttft_s["mean"]), short_number(point.ttft_s["p99"])
        table.add_row(str(ByteSize(point.l1_bytes)), f"{point.hit:.1%}", f"{mean} s", f"{p99} s")
    return table


def _rows(plan: Plan) -> Table:
    heads = ["L1", "eviction", "tier", "write\npolicy", "found\nin L1", "\nin L2", "mean\nTTFT", "p99,\ns"]
    table = table_of(*heads, "tier\nbusy", "lost", "size\na day", "\ncost", text=(1, 2, 3))
    table.collapse_padding, table.show_edge = True, False
    names = {offer: name for name, offer in _tiers(plan).items()}
    for row in plan.rows:
        setting, figures = row.setting, row.figures
        cells = [
            str(ByteSize(setting.l1_bytes)).replace(".0 ", " "),
            setting.eviction,
            "",
            "",
            f"{figures.l1_hit:.1%}",
            "",
        ]
        cells += [short_number(figures.ttft_s[at]) for at in ("mean", "p99")] + [""] * 3
        if setting.tier is not None:
            policy = str(setting.write_policy).removeprefix("write_").removeprefix("through_")
            cells[2:4], cells[5] = (names[setting.tier, setting.l2_bytes], policy), f"{figures.l2_hit:.1%}"
            busy = f"{'*' if figures.saturated else ''}{min(figures.busy, 1.0):.0%}"
            cells[8:] = busy, f"{figures.dropped:.0%}", f"{figures.drive_writes:.1f}" if plan.says_a_day else "?"
        table.add_row(*cells, short_number(figures.cost), style="bold" if row is plan.chosen else None)
    return table


def _tiers(plan: Plan) -> dict[str, tuple[TierOffer, int]]:
    """Return each offer with its size by the name that the table gives it: `disk`, or `disk 2` for the second."""
    named: dict[str, tuple[TierOffer, int]] = {}
    offers = ((row.setting.tier, row.setting.l2_bytes) for row in plan.rows)
    for tier, l2_bytes in sorted({(tier, size) for tier, size in offers if tier is not None}, key=str):
        count = sum(each.name == tier.name for each, _ in named.values())
        named[f"{tier.name} {count + 1}" if count else tier.name] = tier, l2_bytes
    return named


def _rate(bytes_per_s: float) -> str:
    return f"{short_number(bytes_per_s / 1e9)} GB/s"


def check_out(file: Path) -> None:
    """Check before any work that a new `file` can be written. Raises `PlanError`."""
    if file.exists():
        raise PlanError(
            "the file exists, and plan does not overwrite files",
            where=f"--out {file}",
            hint="give another file name, or remove the existing file",
        )
    if not os.access(file.parent, os.W_OK | os.X_OK):
        raise PlanError("the path cannot take the configuration", where=f"--out {file}")


def write_out(plan: Plan, file: Path) -> None:
    """Write the chosen configuration into a new file. Raises `PlanError` if that fails after all."""
    assert plan.chosen is not None
    try:
        with file.open("x") as out:
            out.write(toml_of(plan.chosen.setting, about(plan, plan.chosen)))
    except OSError as error:
        raise PlanError(f"the file cannot be written: {error.strerror}", where=f"--out {file}") from None
    stderr.print(f"wrote {file}; check it on the server's machine: kvframework doctor --config {file}", markup=False)


def about(plan: Plan, row: Row) -> list[str]:
    """Return why the configuration is as it is, in lines."""
    figures, goal = row.figures, plan.goal
    found = f"Found of prompts: {figures.l1_hit:.1%} in L1, {figures.l2_hit:.1%} in L2."
    lines = [
        f"Planned by kvframework {__version__}.",
        _load(plan),
        _speed(plan.engine),
        found,
        f"{_said(row)}; goal: {goal.at} {short_number(goal.ttft_s or 0)} s.",
    ]
    if row.setting.tier is not None:
        written, read = (short_number(rate / 1e9) for rate in (figures.written_per_s, figures.read_per_s))
        a_day = f" ({short_number(figures.drive_writes)} times its size per day)" if plan.says_a_day else ""
        lines.append(f"The tier is written {written} GB/s{a_day}, and read {read} GB/s.")
    return lines
