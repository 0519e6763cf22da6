"""Owns the process of one spinner: a plain Python loop that takes all of a core it can have.

`python -m kvframework.bench.contention.spinner PARENT` says that it is there, then spins until it is killed. It is
killed with its parent, also while it is stopped.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(parent: int) -> None:
    """Never returns."""
    if ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) or os.getppid() != parent:
        sys.exit("the parent is gone")
    os.write(sys.stdout.fileno(), b"spinning\n")
    while True:
        pass


if __name__ == "__main__":
    main(int(sys.argv[1]))
