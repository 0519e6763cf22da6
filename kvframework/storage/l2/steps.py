"""Work of a controller as steps: a generator that yields each call and receives its result. Pure.

Its driver decides when to take a step. A storage thread takes them in sequence (`run`); a simulation interleaves the
steps of many controllers, under its own clock.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import partial
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

Step = Callable[[], object]
# The driver sends a step's result, or throws its exception.
Steps = Generator[Step, Any, R]


def do(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> Steps[R]:
    """Yield a call of `function` as one step, and return its result."""
    result: R = yield partial(function, *args, **kwargs)
    return result


def run(steps: Steps[R]) -> R:
    """Take all steps at once; blocks as long as they do."""
    failure: Exception | None = None
    try:
        step = next(steps)
        while True:
            failure = None
            try:
                result = step()
            except Exception as error:  # noqa: BLE001  the generator decides
                failure = error
            # With the packed objects that it has sent: the generator may pack the next ones now. Until 3.11 an `except`
            # that is not left holds them, too.
            del step
            step = steps.send(result) if failure is None else steps.throw(failure)
    except StopIteration as end:
        answer: R = end.value
        return answer
    finally:
        del failure
