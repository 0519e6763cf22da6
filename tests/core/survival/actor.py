"""A client process as the test that steers it sees it."""

from __future__ import annotations

import subprocess
import sys
from types import TracebackType
from typing import Any

import msgspec

from kvframework.errors import KVFrameworkError
from tests.core.survival import actor_program
from tests.support.processes import send


class Actor:
    """A process of `actor_program`, registered as `instance_id`. Leaving the block kills it."""

    def __init__(self, endpoint: str, instance_id: int) -> None:
        command = [sys.executable, "-m", actor_program.__name__, endpoint, str(instance_id)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.pid = self._process.pid

    def __enter__(self) -> Actor:
        try:
            self.hear()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def ask(self, command: str, *arguments: object) -> Any:
        """Does a command and returns what it says. Raises the typed error that the server gave it."""
        self.tell(command, *arguments)
        return self.hear()

    def tell(self, command: str, *arguments: object) -> None:
        """Gives it a command to do, at once or when it wakes up."""
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode([command, *arguments]).decode() + "\n")
        self._process.stdin.flush()

    def hear(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the actor ended with {self._process.wait(60)}"
        answer = msgspec.json.decode(line)
        if isinstance(answer, dict):
            raise KVFrameworkError.from_code(answer["error"], answer["fact"])
        return answer

    def signal(self, number: int) -> None:
        send(self.pid, number)

    def _end(self) -> None:
        self._process.kill()
        self._process.communicate()
