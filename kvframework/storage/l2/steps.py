"""How a controller's work is cut into steps: a generator that yields what is to be done next and goes on with what came
of it. Pure.

Its driver decides when a step is taken. A storage thread takes one after the other (`run`); a simulation interleaves
the steps of many, under a clock of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import partial
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

Step = Callable[[], object]
# The driver sends what a step returned, or throws what it raised.
Steps = Generator[Step, Any, R]


def do(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> Steps[R]:
    """One step: a call of `function`, whenever the driver takes it."""
    result: R = yield partial(function, *args, **kwargs)
    return result


def run(steps: Steps[R]) -> R:
    """Takes all steps, here and now; blocks for as long as they do."""
    try:
        step = next(steps)
        while True:
            try:
                result = step()
            except Exception as error:  # noqa: BLE001  the generator decides
                step = steps.throw(error)
            else:
                step = steps.send(result)
    except StopIteration as end:
        answer: R = end.value
        return answer
