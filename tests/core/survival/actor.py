"""A client process as the test that steers it sees it."""

from __future__ import annotations

from typing import Any

from kvframework.errors import KVFrameworkError
from tests.core.survival import actor_program
from tests.support.line_process import JsonProcess


class Actor(JsonProcess):
    """A process of `actor_program`, registered as `instance_id`."""

    def __init__(self, endpoint: str, instance_id: int) -> None:
        super().__init__("-m", actor_program.__name__, endpoint, str(instance_id))

    def hear(self) -> Any:
        """Its next answer. Raises the typed error that the server gave it."""
        answer = super().hear()
        if isinstance(answer, dict):
            raise KVFrameworkError.from_code(answer["error"], answer["fact"])
        return answer
