"""A client process as the test that steers it sees it."""

from __future__ import annotations

from typing import Any

import msgspec

from kvframework.errors import KVFrameworkError
from tests.core.survival import actor_program
from tests.support.line_process import LineProcess


class Actor(LineProcess):
    """A process of `actor_program`, registered as `instance_id`."""

    def __init__(self, endpoint: str, instance_id: int) -> None:
        super().__init__("-m", actor_program.__name__, endpoint, str(instance_id))

    def __enter__(self) -> Actor:
        try:
            self.hear()
        except BaseException:
            self.__exit__()
            raise
        return self

    def ask(self, command: str, *arguments: object) -> Any:
        """Does a command and returns what it says. Raises the typed error that the server gave it."""
        self.tell(command, *arguments)
        return self.hear()

    def tell(self, command: str, *arguments: object) -> None:
        """Gives it a command to do, at once or when it wakes up."""
        super().tell(msgspec.json.encode([command, *arguments]).decode())

    def hear(self) -> Any:
        answer = msgspec.json.decode(super().hear())
        if isinstance(answer, dict):
            raise KVFrameworkError.from_code(answer["error"], answer["fact"])
        return answer
