"""Owns how a lease is given back after a failure, or if nobody waits for it any more. Engine side."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from kvf_cpu_gather.steps import Steps
from kvframework.api import MessagingFuture, RetrievePlan, StorePlan
from kvframework.errors import KVFrameworkError

_log = logging.getLogger(__name__)

P = TypeVar("P", StorePlan, RetrievePlan)


def planned(sent: MessagingFuture[P], end: Callable[[str], object]) -> Steps[P]:
    """The plan that was asked for. If the transfer is cancelled meanwhile, `end` gives the plan's lease back when it
    comes."""
    try:
        plan: P = yield sent
    except GeneratorExit:
        sent.add_done_callback(lambda done: _give_back(done, end))
        raise
    return plan


@contextmanager
def given_back(end: Callable[[str], object], lease: str) -> Iterator[None]:
    """Calls `end(lease)` if the body fails. If that fails too, the lease ends with its time or with this client."""
    try:
        yield
    except BaseException:
        try:
            end(lease)
        except KVFrameworkError as error:
            _log.debug("the lease was not released: %s", error)
        raise


def _give_back(sent: MessagingFuture[P], end: Callable[[str], object]) -> None:
    if sent.exception() is None and (lease := sent.result(0).lease):
        end(lease)
