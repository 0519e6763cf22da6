"""The rate limit of log lines."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from kvframework.logs.limit import LogLimit

AT_ONCE, EVERY_S = 3, 10.0


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def lines(clock: Clock) -> Iterator[Lines]:
    handler = Lines()
    handler.addFilter(LogLimit(AT_ONCE, EVERY_S, clock))
    for name in ("limited", "other"):
        logger = logging.getLogger(name)
        logger.propagate = False
        logger.setLevel(logging.DEBUG)
        logger.addHandler(handler)
    yield handler
    for name in ("limited", "other"):
        logging.getLogger(name).removeHandler(handler)


def test_a_flood_is_cut_and_counted(lines: Lines, clock: Clock) -> None:
    log = logging.getLogger("limited")
    for number in range(100):
        log.warning("lost %d", number)
    assert lines.said == ["lost 0", "lost 1", "lost 2"]
    clock.now = EVERY_S
    log.warning("lost %d", 100)
    assert lines.said[-1] == "lost 100 (97 similar lines left out)"
    log.warning("lost %d", 101)
    assert lines.said[-1] == "lost 101"


def test_other_kinds_are_told_meanwhile(lines: Lines) -> None:
    log = logging.getLogger("limited")
    for number in range(100):
        log.warning("lost %d", number)
    log.warning("found %d", 1)
    log.error("lost %d", 1)
    logging.getLogger("other").warning("lost %d", 2)
    assert lines.said[AT_ONCE:] == ["found 1", "lost 1", "lost 2"]


def test_what_is_no_trouble_is_never_cut(lines: Lines) -> None:
    for number in range(100):
        logging.getLogger("limited").info("instance %d registered", number)
    assert len(lines.said) == 100


def test_a_quiet_time_is_not_told(lines: Lines, clock: Clock) -> None:
    log = logging.getLogger("limited")
    log.warning("lost")
    clock.now = 5 * EVERY_S
    log.warning("lost")
    assert lines.said == ["lost", "lost"]


def test_arguments_that_do_not_fit_raise_nothing_here(lines: Lines, clock: Clock) -> None:
    record = logging.LogRecord("limited", logging.WARNING, "", 1, "%s of %s", ("one", "two"), None)
    assert lines.filter(record)
    assert record.getMessage() == "one of two"


def test_what_is_asked_of_has_kinds_of_its_own(clock: Clock) -> None:
    limit = LogLimit(1, EVERY_S, clock)
    assert [limit.passes(kind) for kind in ("a", "a", ("a", 1), "a")] == [True, False, True, False]
    clock.now = EVERY_S
    assert limit.passes("a")


def test_once_is_once_until_the_trouble_ends() -> None:
    once = LogLimit.once()
    assert once.passes("a")
    assert not once.passes("a")
    once.clear()
    assert once.passes("a")


def test_the_kind_that_is_said_again_and_again_is_not_the_one_forgotten() -> None:
    once = LogLimit.once()
    once.passes("often")
    for number in range(5000):
        assert once.passes(number)
        assert not once.passes("often")


def test_the_kinds_kept_are_bounded(clock: Clock) -> None:
    limit = LogLimit(AT_ONCE, EVERY_S, clock)
    for number in range(5000):
        limit.filter(logging.LogRecord("x", logging.WARNING, "", 1, f"text {number}", (), None))
    assert len(limit._spans) <= 1024
