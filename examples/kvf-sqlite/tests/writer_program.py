"""A server of its own, from the tier's view: stores values until it is killed or has stored `count`.

Arguments: path, seed, count (0: without end), and `die` for an end in the middle of the first. A value's bytes all are
the seed; its key begins with it.
"""

import itertools
import os
import signal
import sys
import time

from kvf_sqlite import tier as tier_module
from kvf_sqlite.options import SqliteOptions
from kvf_sqlite.tier import open_tier

from kvframework.api.keys import PACKED_KEY_BYTES
from kvframework.api.plugin import ByteSize
from kvframework.api.tier import Outcome

VALUE_BYTES = 50_000


def die(*_step: object) -> None:
    """Replaces the last step of a put by a kill."""
    os.kill(os.getpid(), signal.SIGKILL)


def main(path: str, seed: int, count: int) -> None:
    tier = open_tier(SqliteOptions(path=path, capacity=ByteSize(1 << 30)), where="writer")
    value = memoryview(bytes([seed]) * VALUE_BYTES)
    for number in range(count) if count else itertools.count():
        key = (bytes([seed]) + number.to_bytes(8, "big")).ljust(PACKED_KEY_BYTES, b"\0")
        assert tier.put([key], [[value]], deadline=time.monotonic() + 20) == [Outcome.STORED]
        sys.stdout.write(f"{number}\n")
        sys.stdout.flush()
    tier.close()


if __name__ == "__main__":
    if "die" in sys.argv[4:]:
        tier_module.insert = die
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
