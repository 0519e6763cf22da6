"""The file that `kvframework plan --out` writes."""

from __future__ import annotations

import os
from pathlib import Path

from kvf_plan.planning.goal import Row
from kvf_plan.planning.plan import Plan
from kvf_plan.planning.setting import toml_of
from kvframework import __version__
from kvframework.api.options import ByteSize
from kvframework.cli.console import stderr
from kvframework.errors import PlanError
from kvframework.text import short_number


def check_out(file: Path) -> None:
    """Check before any work that a new `file` can be written. Raises `PlanError`."""
    if file.exists():
        raise PlanError(
            "the file exists, and a plan overwrites none", where=f"--out {file}", hint="name another, or remove it"
        )
    if not os.access(file.parent, os.W_OK | os.X_OK):
        raise PlanError("the configuration cannot be written there", where=f"--out {file}")


def write_out(plan: Plan, file: Path) -> None:
    """Write the chosen configuration into a new file. Raises `PlanError` if that fails after all."""
    assert plan.chosen is not None
    try:
        with file.open("x") as out:
            out.write(toml_of(plan.chosen.setting, about(plan, plan.chosen)))
    except OSError as error:
        raise PlanError(f"cannot be written: {error.strerror}", where=f"--out {file}") from None
    stderr.print(f"written: {file}; check it on the machine: kvframework doctor --config {file}", markup=False)


def about(plan: Plan, row: Row) -> list[str]:
    """Return why the configuration is as it is, in lines."""
    engine, figures, goal = plan.engine, row.figures, plan.goal
    part = "a part of the sessions of " if row.sampled else ""
    speed = f"{engine.tokens_per_s:,.0f} tokens of prompts/s ({engine.basis})"
    trace = f"{part}{plan.trace}: {plan.requests:,} requests in {plan.seconds / 60:.0f} minutes."
    wanted = f"goal: {goal.at} {short_number(goal.ttft_s or 0)} s."
    mean, p99 = (short_number(figures.ttft_s[at]) for at in ("mean", "p99"))
    lines = [
        f"Planned by kvframework {__version__} for {trace}",
        f"{plan.engines} x {engine.words}: {speed},",
        f"{ByteSize(engine.bytes_per_token)} of KV a token.",
        f"Found of prompts: {figures.l1_hit:.1%} in L1, {figures.l2_hit:.1%} in L2.",
        f"Time to the first token: mean {mean} s, p99 {p99} s; {wanted}",
    ]
    if row.setting.tier is not None:
        written, read = (short_number(rate / 1e9) for rate in (figures.written_per_s, figures.read_per_s))
        a_day = f" ({short_number(figures.drive_writes)} times its size a day)" if plan.says_a_day else ""
        lines.append(f"The tier is written {written} GB/s{a_day}, and read {read} GB/s.")
    return lines
