"""The log of a server that `kvframework run` has started: a process that starts the server's keeper, reads its output
and bounds the file, of which the older half stands beside it as FILE.1."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import IO

from kvframework.api.endpoint import parse_endpoint

# Of each of the two files.
MOST_BYTES = 8 << 20
_READ_BYTES = 64 << 10


def log_path(endpoint: str) -> Path:
    return Path(f"{parse_endpoint(endpoint).path}.log")


def older(path: Path) -> Path:
    return path.with_name(f"{path.name}.1")


def last_lines(path: Path, count: int) -> list[str]:
    """Return the last lines of both files. Blocking. Raises `FileNotFoundError` where there is no log."""
    lines: deque[str] = deque(maxlen=count)
    with contextlib.suppress(FileNotFoundError):
        lines.extend(older(path).read_text(errors="replace").splitlines())
    lines.extend(path.read_text(errors="replace").splitlines())
    return list(lines)


def followed(path: Path, pause_s: float = 0.2) -> Generator[str, None, None]:
    """Yield text that is appended to the log from now on, over its turns. Blocks without an end."""
    begin = path.stat().st_size
    while True:
        with path.open(errors="replace") as file:
            file.seek(begin)
            turned = False
            while not turned:
                # Asked before the read, so that what was written before the turn is read.
                turned = _has_turned(path, file)
                if text := file.read():
                    yield text
                elif not turned:
                    time.sleep(pause_s)
        begin = 0


def _has_turned(path: Path, file: IO[str]) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.stat(path).st_ino != os.fstat(file.fileno()).st_ino
    return False


def write(source: int, path: Path, most: int = MOST_BYTES) -> None:
    """Append what comes from the descriptor to the file, until its end. A full disk loses text, and no writer waits."""
    target, size = _opened(path)
    while text := os.read(source, _READ_BYTES):
        if size >= most:
            # At the end of a line where there is one: the rest of it goes to the older file.
            end = text.rfind(b"\n") + 1
            with contextlib.suppress(OSError):
                os.write(target, text[:end])
                # The file stays open until the next one is: where the path cannot turn, it goes on.
                os.replace(path, older(path))
                turned, (target, size) = target, _opened(path)
                os.close(turned)
            text = text[end:]
        with contextlib.suppress(OSError):
            size += os.write(target, text)


def _opened(path: Path) -> tuple[int, int]:
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    target = os.open(path, flags, 0o600)
    return target, os.fstat(target).st_size


def start(path: Path, note: Path, command: Sequence[str]) -> None:
    """Start the command in a process that is no child of the caller, note its id in a file, and write its output into
    the log until its end. The caller becomes an engine, which may kill all its children when it
    ends, as SGLang does: the server is not among them."""
    if os.fork():
        os._exit(0)
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    note.write_text(f"{process.pid}\n")
    assert process.stdout is not None
    write(process.stdout.fileno(), path)
    process.wait()


if __name__ == "__main__":
    start(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
