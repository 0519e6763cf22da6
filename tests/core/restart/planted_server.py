"""`kvframework serve` as the child of a keeper, with the trouble that the file of the variable `PLANT` asks for:

* "never-served": no start ever counts as one that served;
* "no-room": there is no memory for an arena beside the kept one;
* a kind of `STRANGERS`: it has its keeper hold something else in the place of a name, and ends; the file is removed.
"""

from __future__ import annotations

import math
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path

from kvframework.keeper.sd_notify import Keeper
from kvframework.storage.recovery import ARENA, JOURNAL

PLANT = "KVFRAMEWORK_TEST_PLANT"
FILE_TEXT = b"a file of somebody"


def pipe(_folder: Path) -> int:
    return os.pipe()[0]


def directory(folder: Path) -> int:
    return os.open(folder, os.O_RDONLY)


def file(folder: Path) -> int:
    path = folder / "stranger"
    path.write_bytes(FILE_TEXT)
    return os.open(path, os.O_RDWR)


def device(_folder: Path) -> int:
    return os.open("/dev/zero", os.O_RDWR)


def unix_socket(_folder: Path) -> int:
    return socket.socket(socket.AF_UNIX).detach()


def empty(_folder: Path) -> int:
    return os.memfd_create("empty")


def read_only(_folder: Path) -> int:
    fd = os.memfd_create("other")
    os.ftruncate(fd, 1 << 20)
    return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)


STRANGERS: dict[str, Callable[[Path], int]] = {
    made.__name__: made for made in (pipe, directory, file, device, unix_socket, empty, read_only)
}
NAMES = {"arena": ARENA, "journal": JOURNAL, "unknown": "of-nobody"}


def main() -> None:
    plant = Path(os.environ[PLANT])
    asked = plant.read_text() if plant.exists() else ""
    if asked == "never-served":
        from kvframework.storage import table

        table.SERVED_S = math.inf
    elif asked == "no-room":
        from kvf_pinned import memory

        memory.available_memory = lambda: 0
    elif asked:
        kind, name = asked.split()
        plant.unlink()
        keeper = Keeper.from_environment()
        assert keeper is not None
        keeper.remove(NAMES[name])
        keeper.store(NAMES[name], STRANGERS[kind](plant.parent))
        sys.exit(1)
    from kvframework.cli.main import main as serve

    serve()


if __name__ == "__main__":
    main()
