"""The queue of a log: every line comes to its reader, in order, or is counted where it is missing. The rate limit of
log lines."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvframework.logs import process_log as log_queue
from kvframework.logs.limit import LogLimit
from kvframework.logs.process_log import PrintedLines, QueuedHandler
from tests.support.full_pipe import full_pipe
from tests.support.waiting import wait_until

MISSING = re.compile(r"(\d+) lines are missing here")


def record(message: str, *args: object, **fields: object) -> logging.LogRecord:
    return logging.LogRecord("a.b", logging.INFO, "", 1, message, args, None, **fields)  # type: ignore[arg-type]


class Reader:
    """Takes what a full pipe held, then what the handler wrote."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._text = ""
        os.set_blocking(fd, False)

    def lines(self) -> list[str]:
        try:
            while data := os.read(self._fd, 1 << 16):
                self._text += data.decode()
        except BlockingIOError:
            pass
        return self._text.lstrip(".").split("\n")[:-1]


@pytest.fixture
def pipe() -> Iterator[tuple[Reader, int]]:
    with full_pipe() as (reader, writer):
        yield Reader(reader), writer


def accounted(lines: list[str]) -> int:
    return sum(int(found[1]) if (found := MISSING.match(line)) else 1 for line in lines)


@given(sizes=st.lists(st.integers(0, 3000), min_size=1, max_size=60), limit=st.integers(2000, 40000))
@settings(deadline=None, max_examples=25)
def test_each_line_comes_in_order_or_is_counted_at_its_place(sizes: list[int], limit: int) -> None:
    with full_pipe() as (fd, writer):
        reader, handler = Reader(fd), QueuedHandler(writer, limit)
        for number, size in enumerate(sizes):
            handler.handle(record("%d %s", number, "x" * size))
            if number == len(sizes) // 2:
                reader.lines()
        wait_until(lambda: accounted(reader.lines()) == len(sizes))
        at = 0
        for line in reader.lines():
            if found := MISSING.match(line):
                at += int(found[1])
            else:
                assert line.startswith(f"{at} ")
                at += 1
        assert handler.drain(10)
        assert handler.problem == ""
        assert handler.dropped == len(sizes) - sum(not MISSING.match(line) for line in reader.lines())


def test_what_does_not_fit_is_counted_and_said(pipe: tuple[Reader, int]) -> None:
    reader, fd = pipe
    handler = QueuedHandler(fd, limit=5_000)
    for number in range(100):
        handler.handle(record("line %d", number))
    assert handler.dropped > 80
    assert handler.problem == "is not read"
    assert not handler.drain(0.01)
    wait_until(lambda: accounted(reader.lines()) == 100)
    assert handler.problem == ""
    assert f"{handler.dropped} lines are missing here" in reader.lines()[-1]


def test_a_write_that_failed_in_the_middle_ends_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    written, room = bytearray(), [4]

    def write(_fd: int, data: memoryview) -> int:
        if not room[0]:
            raise OSError(28, "No space left on device")
        taken = min(room[0], len(data))
        room[0] -= taken
        written.extend(data[:taken])
        return taken

    monkeypatch.setattr(log_queue.os, "write", write)
    handler = QueuedHandler(2)
    handler.handle(record("first line"))
    assert handler.drain(10)
    assert handler.problem == "cannot be written: No space left on device"
    assert handler.dropped == 1
    room[0] = 1000
    handler.handle(record("second line"))
    assert handler.drain(10)
    assert handler.problem == ""
    torn, notice, line = bytes(written).decode().splitlines()
    assert (torn, line) == ("firs", "second line")
    assert notice.startswith("1 lines are missing here")


def test_a_record_in_the_queue_holds_nothing_of_its_caller(pipe: tuple[Reader, int]) -> None:
    reader, fd = pipe
    handler = QueuedHandler(fd)
    items = [1]
    handler.handle(record("%s", items))
    items.append(2)
    arena = memoryview(bytearray(8))

    def fail(view: memoryview) -> None:
        part = view[:4]
        raise ValueError(f"{len(part)} bytes")

    try:
        fail(arena)
    except ValueError as error:
        failed = record("failed")
        failed.exc_info = (type(error), error, error.__traceback__)
        handler.handle(failed)
        del failed
    arena.obj  # noqa: B018
    arena.release()
    handler.handle(record("%d", "no number"))
    wait_until(lambda: len(reader.lines()) >= 3 and "do not fit" in reader.lines()[-1])
    assert reader.lines()[0] == "[1]"
    assert "ValueError: 4 bytes" in reader.lines()


def test_many_threads_lose_nothing_uncounted(pipe: tuple[Reader, int]) -> None:
    reader, fd = pipe
    handler = QueuedHandler(fd, limit=50_000)
    threads = [threading.Thread(target=lambda: [handler.handle(record("x")) for _ in range(200)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wait_until(lambda: accounted(reader.lines()) == 800)


def test_what_is_printed_is_a_line_of_the_log() -> None:
    seen: list[tuple[str, str]] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.append((record.levelname, record.getMessage()))

    stream = PrintedLines(Collect(), "stderr", logging.WARNING, 2)
    print("one", 100, "%s", file=stream)
    print("two\nthree", end="", file=stream)
    assert [line for _, line in seen] == ["one 100 %s", "two"]
    print(file=stream)
    print("x" * 10_000, end="", file=stream)
    stream.end_line()
    assert [line for _, line in seen[2:]] == ["three", "x" * 10_000]
    assert {level for level, _ in seen} == {"WARNING"}
    assert stream.fileno() == 2
    assert stream.writable()


def test_a_closed_standard_error_is_not_what_has_its_number_by_now() -> None:
    program = (
        "import logging, os\n"
        "arena = os.memfd_create('arena')\n"
        "os.ftruncate(arena, 4096)\n"
        "from kvframework.logs.process_log import configure_logging, end_logging\n"
        "configure_logging('info', 'human')\n"
        "logging.getLogger('a').error('a line')\n"
        "end_logging()\n"
        "os._exit(arena + 10 * any(os.pread(arena, 4096, 0)))\n"
    )
    done = subprocess.run(["sh", "-c", 'exec "$0" -c "$1" 2>&-', sys.executable, program], timeout=240, check=False)
    assert done.returncode == 2, "the arena has the descriptor of standard error, and is empty"


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
