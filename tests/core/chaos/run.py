"""`python -m tests.core.chaos.run --seed N --seconds S`: one run of the chaos harness."""

from __future__ import annotations

import argparse
import random
import sys

from tests.core.chaos.course import Broken, Course
from tests.core.chaos.schedule import LANES
from tests.core.chaos.server_program import BUGS
from tests.core.chaos.world import ENGINES, Plan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--engines", type=int, default=ENGINES)
    parser.add_argument("--l2", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--held", action="store_true", help="a keeper has the server's L1")
    parser.add_argument("--bug", choices=sorted(BUGS), default="", help="plant it, to see it found")
    parser.add_argument("--lanes", nargs="*", default=[lane.name for lane in LANES])
    chosen = parser.parse_args()
    print(f"seed {chosen.seed}")
    plan = Plan(chosen.seed, chosen.seconds, chosen.engines, chosen.l2, chosen.bug, chosen.held)
    try:
        ledger = Course(plan, [lane for lane in LANES if lane.name in chosen.lanes], print).run()
    except Broken as error:
        sys.exit(str(error))
    print(f"seen: {dict(ledger.tally)}\nfaults: {dict(ledger.faults)}")


if __name__ == "__main__":
    main()
