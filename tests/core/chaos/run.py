"""`python -m tests.core.chaos.run --seed N --seconds S`: one run of the chaos harness with live output."""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Sequence

from rich.console import Console
from rich.live import Live
from rich.table import Table

from tests.core.chaos.course import Broken, Course
from tests.core.chaos.ledger import Ledger
from tests.core.chaos.schedule import LANES, Fault
from tests.core.chaos.server_program import BUGS
from tests.core.chaos.world import ENGINES, Plan

_LAST_FAULTS = 8


def account(ledger: Ledger, begun: Sequence[Fault], began: float) -> Table:
    """Return a table of the tally so far and of the last faults."""
    table = Table(title=f"{time.monotonic() - began:.0f} s", box=None)
    table.add_column("seen")
    table.add_column("faults", no_wrap=True)
    seen = "\n".join(f"{name:>16} {number:,}" for name, number in sorted(ledger.tally.items()))
    table.add_row(seen, "\n".join([*map(str, begun[-_LAST_FAULTS:]), f"{sum(ledger.faults.values())} faults"]))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--engines", type=int, default=ENGINES)
    parser.add_argument("--l2", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--held", action="store_true", help="a keeper has the server's L1")
    parser.add_argument("--bug", choices=sorted(BUGS), default="", help="plant it, to see it found")
    parser.add_argument("--lanes", nargs="*", default=[lane.name for lane in LANES])
    chosen = parser.parse_args()
    seed = random.SystemRandom().randrange(1 << 32) if chosen.seed is None else chosen.seed
    lanes = [lane for lane in LANES if lane.name in chosen.lanes]
    plan = Plan(seed, chosen.seconds, chosen.engines, chosen.l2, chosen.bug, chosen.held)
    console = Console()
    console.print(f"seed {seed}")
    began = time.monotonic()
    with Live(console=console, auto_refresh=False) as live:

        def show(ledger: Ledger, begun: Sequence[Fault]) -> None:
            live.update(account(ledger, begun, began), refresh=True)

        course = Course(plan, lanes, show)
        try:
            ledger = course.run()
        except Broken as error:
            live.stop()
            console.print(str(error), markup=False, highlight=False, soft_wrap=True)
            sys.exit(1)
        live.update(account(ledger, (), began), refresh=True)
    console.print(f"faults: {dict(ledger.faults)}", highlight=False)


if __name__ == "__main__":
    main()
