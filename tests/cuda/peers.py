"""Processes on a simulated node that a test controls; see `peer_program`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import TracebackType
from typing import Any

from tests.cuda.building import environment
from tests.cuda.node import CudaNode

DATA = bytes(range(256))
# The content of new memory.
STALE = b"\xc5"
# Flags of a stream and of an opened handle.
NON_BLOCKING = 1
LAZY = 1


class Refused(Exception):
    """An error of the driver, with the driver's name for it."""


class Peer:
    """A process on device `ordinal` of those it sees. `variables` are added to its environment."""

    def __init__(self, node: CudaNode, *, ordinal: int = 0, **variables: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.cuda.peer_program"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment(node.path), **variables},
        )
        try:
            self("start", ordinal)
        except BaseException:
            self._end()
            raise

    def __call__(self, function: str, *arguments: object, keep: str = "_") -> Any:
        """Call the function in the process. Raises `Refused`."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps([keep, function, *map(_plain, arguments)]) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, f"the process ended with status {self.process.wait()}"
        verdict, value = json.loads(line)
        if verdict != "ok":
            raise Refused(verdict)
        return value

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end()

    def _end(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.kill()


def kinds(node: CudaNode) -> list[str]:
    """Return the kinds of the violations so far."""
    return [violation.kind for violation in node.violations()]


def _plain(argument: object) -> object:
    return f"hex:{argument.hex()}" if isinstance(argument, bytes) else argument
