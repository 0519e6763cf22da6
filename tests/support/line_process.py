"""A Python program that a test steers by lines: it tells one on the standard input, and hears one on the output."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from typing import Any

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
