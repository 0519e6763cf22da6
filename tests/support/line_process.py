"""A Python program that a test controls by lines: one on its standard input, one on its standard output."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import msgspec

from tests.support.processes import send


class LineProcess:
    """`arguments` are the interpreter's. Leaving the block kills it."""

    def __init__(self, *arguments: str, env: Mapping[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            [sys.executable, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
        )
        self.pid = self.process.pid

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.process.kill()
        self.process.communicate()

    def hear(self) -> str:
        """Its next line. Blocks until there is one."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the process has ended with {self.process.wait(60)}"
        return line.strip()

    def tell(self, line: str = "") -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def ask(self, line: str = "") -> str:
        self.tell(line)
        return self.hear()

    def signal(self, number: int) -> None:
        send(self.pid, number)


class JsonProcess(LineProcess):
    """A program that prints a line once it is ready, then takes commands and prints answers, both as JSON."""

    def __enter__(self) -> Any:
        try:
            self.hear()
        except BaseException:
            self.__exit__()
            raise
        return self

    def ask(self, command: str, *arguments: object) -> Any:
        """Run a command and return its answer."""
        self.tell(command, *arguments)
        return self.hear()

    def tell(self, command: str, *arguments: object) -> None:
        """Send a command, which the program runs at once or when it wakes up."""
        super().tell(msgspec.json.encode([command, *arguments]).decode())

    def hear(self) -> Any:
        return msgspec.json.decode(super().hear())
