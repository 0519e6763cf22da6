"""Steps in sequence: what a step holds is let go before the next one is made."""

from __future__ import annotations

import weakref

import pytest

from kvframework.storage.l2.steps import Steps, do, run


class Packed:
    """Stands for the packed objects of a batch."""


def let_go(packed: weakref.ref[Packed]) -> bool:
    return packed() is None


def sends(packed: Packed) -> str:
    return "sent"


def fails(packed: Packed) -> str:
    raise ValueError("not sent")


def send(work: object) -> Steps[weakref.ref[Packed]]:
    packed = Packed()
    try:
        yield from do(work, packed)  # type: ignore[arg-type]
    except ValueError as error:
        error.__traceback__ = None
    return weakref.ref(packed)


@pytest.mark.parametrize("work", [sends, fails])
def test_what_a_step_has_sent_is_let_go_before_the_next_is_made(work: object) -> None:
    def batches() -> Steps[list[bool]]:
        found = []
        for _ in range(3):
            packed = yield from send(work)
            found.append(let_go(packed))
        return found

    assert run(batches()) == [True] * 3
