"""The conformance kit for the memory of L1: tests that every `Memory` must pass, see docs/plugins/memory.md.

Sizes are up to 40 MiB. Needs pytest alone.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import stat
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from typing import ClassVar

import pytest

from kvf_dev.testing.kit import NamedKit, held, must_refuse, wait_until
from kvframework.api.memory import ArenaError, Memory, MemoryContext, MemoryProvider
from kvframework.storage.l1.journal import own_description

MakeMemory = Callable[[int], Memory]
MakeKeptMemory = Callable[[int, int], Memory]

_PAGE = 4096
# Few pages, several steps of some MiB that do not end at a step, and a size that is no number of pages.
_SIZES = {"1 MiB": 1 << 20, "40 MiB and 3 pages": (40 << 20) + 3 * _PAGE, "3 MiB and 123 bytes": (3 << 20) + 123}
_CAPACITY = _SIZES["40 MiB and 3 pages"]
_of_every_size = pytest.mark.parametrize("memory", _SIZES.values(), ids=list(_SIZES), indirect=True)


class MemoryConformance(NamedKit):
    """Base class of an author's test class, which gives `use`, or a fixture `make_memory`: a factory that takes the
    size in bytes. Memory that outlives its server is tested for a provider with `keeps`, or by `make_kept_memory`."""

    _descriptor = MemoryProvider
    usual_s = 20.0
    _where = "[l1]"

    patience_s: ClassVar[float] = 20.0
    """Seconds within which memory of this size becomes usable, and closes."""

    @pytest.fixture
    def make_memory(self) -> MakeMemory:
        """Return a factory of memory by its size in bytes, which raises `ArenaError` for what cannot be had."""
        self.resolve({**self.options, "capacity": _CAPACITY})  # a wrong name is an error here, and not in each test
        return self._make

    @pytest.fixture
    def make_kept_memory(self) -> MakeKeptMemory:
        """Return a factory of memory by its size and a descriptor, as `MemoryContext.kept`."""
        if not self.use:
            pytest.skip("The test class has no fixture `make_kept_memory`")
        return self._make

    def _make(self, capacity: int, kept: int | None = None) -> Memory:
        provider, options = self.resolve({**self.options, "capacity": capacity})
        if kept is not None and not provider.keeps:
            os.close(kept)
            pytest.skip("The plugin's provider has no `keeps`")
        memory: Memory = provider.create(options, MemoryContext(self._where, kept=kept))
        return memory

    @pytest.fixture
    def memory(self, make_memory: MakeMemory, request: pytest.FixtureRequest) -> Iterator[Memory]:
        memory = make_memory(getattr(request, "param", _CAPACITY))
        yield memory
        memory.close()

    def _started(self, memory: Memory) -> Memory:
        ends: list[int] = []
        memory.start(ends.append)
        self._until_all_is_ready(memory, ends)
        return memory

    def _until_all_is_ready(self, memory: Memory, ends: list[int]) -> None:
        __tracebackhide__ = True
        what = f"on_ready({memory.capacity}), which reports all of the memory,"
        wait_until(lambda: ends and ends[-1] >= memory.capacity, what, self.patience_s)

    # bytes

    @_of_every_size
    def test_all_of_it_is_there_and_writable(self, memory: Memory, request: pytest.FixtureRequest) -> None:
        assert isinstance(memory.capacity, int), "The memory's `capacity` must be a number of bytes"
        asked = request.node.callspec.params["memory"]
        assert memory.capacity >= asked, "The memory's `capacity` is less than the requested bytes"
        assert not os.get_inheritable(memory.fd), "`fd` is inheritable: every child process would hold the memory"
        if _taken(memory.fd) is not None:
            nbytes = os.fstat(memory.fd).st_size
            assert nbytes >= memory.capacity, f"`fd` has {nbytes} bytes, but `capacity` is {memory.capacity}"
        with memory.view() as view:
            assert view.nbytes == memory.capacity, f"`view` returned {view.nbytes} of the {memory.capacity} bytes"
            assert (view.format, view.ndim) == ("B", 1), "`view` must return a one-dimensional view of the format B"
            assert not view.readonly, "`view` returned a view that is not writable"
            assert view.contiguous, "`view` returned a view that is not contiguous"
            _mark(view, 3)
            wrong = _wrong_page(view, 3)
            assert wrong is None, f"Byte {wrong} changed after it was written: two addresses share memory"

    def test_every_view_shows_the_same_bytes(self, memory: Memory) -> None:
        one, other = memory.view(), memory.view()
        _mark(one, 5)
        assert _wrong_page(other, 5) is None, "A view does not show bytes written to another view"
        one.release()
        try:
            assert _wrong_page(other, 5) is None, "A view shows other bytes after another view was released"
        except ValueError:
            pytest.fail("Releasing one view released another: `view` must return a new view at each call")
        other.release()
        with memory.view() as later:
            assert _wrong_page(later, 5) is None, "A new view does not show bytes written to an earlier view"

    @_of_every_size
    def test_a_client_maps_the_descriptor_and_shares_the_bytes(self, memory: Memory) -> None:
        with memory.view() as view:
            _mark(view, 1)
            try:
                client = mmap.mmap(memory.fd, int(memory.capacity))
            except OSError as error:
                pytest.fail(f"A client cannot use the descriptor: {error}")
            with client, memoryview(client) as seen:
                assert _wrong_page(seen, 1) is None, "A client's mapping does not show bytes that the server wrote"
                _mark(seen, 2)
            assert _wrong_page(view, 2) is None, (
                "`view` does not show bytes that a client wrote: the mapping is not shared"
            )

    def test_two_have_nothing_in_common(self, make_memory: MakeMemory, memory: Memory) -> None:
        other = make_memory(_CAPACITY)
        with memory.view() as ours:
            try:
                _mark(ours, 7)
                assert other.fd != memory.fd, "Two memory objects have the same descriptor"
                with other.view() as theirs:
                    _mark(theirs, 8)
                assert _wrong_page(ours, 7) is None, "A write to one memory object changed another"
            finally:
                other.close()
            assert _wrong_page(ours, 7) is None, "Closing one memory object changed another"
            try:
                os.fstat(memory.fd)
            except OSError:
                pytest.fail("Closing one memory object closed another's descriptor")

    def test_memory_that_cannot_be_had_is_refused(self, make_memory: MakeMemory) -> None:
        with _leaving_nothing("an ArenaError"):
            must_refuse("Making memory of 2^60 bytes", lambda: make_memory(1 << 60).close(), ArenaError)

    # readiness

    @_of_every_size
    def test_it_becomes_usable_in_the_background(self, memory: Memory) -> None:
        """`start` returns before the first piece has been taken; each end that is reported is above the one before."""
        started = threading.Event()
        ends: list[int] = []
        late: list[int] = []
        threads: set[int] = set()

        def on_ready(end: int) -> None:
            if not late and not started.wait(self.patience_s):
                late.append(end)
            threads.add(threading.get_ident())
            ends.append(end)

        try:
            memory.start(on_ready)
            assert not ends, "`start` must return at once, but waited for on_ready"
        finally:
            started.set()
        self._until_all_is_ready(memory, ends)
        assert not late, "`start` must return at once, but waited for on_ready"
        assert ends == sorted(set(ends)), f"n of on_ready(n) must grow at each call, but was {ends[:8]}"
        assert ends[0] > 0, "The memory called on_ready(0), which reports no bytes"
        assert ends[-1] == memory.capacity, f"The last on_ready({ends[-1]}) must be the capacity, {memory.capacity}"
        assert threading.get_ident() not in threads, "The memory called on_ready in the thread of `start`: use a thread"

    def test_what_is_reported_is_there_and_stays(self, memory: Memory) -> None:
        """The core hands out what lies below n, and an engine's store must not wait for the kernel: a write there takes
        no more memory. The caller writes to each piece at once, while later pieces become usable."""
        ends = [0]
        wrong: list[str] = []
        calls = threading.Lock()

        def on_ready(end: int) -> None:
            if not calls.acquire(blocking=False):
                wrong.append("the memory called on_ready during an earlier call, so n may not grow")
                return
            found = _taken(memory.fd)
            with memory.view() as place, place[ends[-1] : end] as piece:
                piece[:] = b"\7" * len(piece)
            after = _taken(memory.fd)
            if found is not None and after is not None and (found < end // _PAGE * _PAGE or after > found):
                wrong.append(f"at on_ready({end}) {found} bytes are resident, and {after} after a write")
            ends.append(end)
            calls.release()

        with memory.view() as view:
            memory.start(on_ready)
            self._until_all_is_ready(memory, ends)
            assert not wrong, wrong[0]
            for start, end in itertools.pairwise(ends):
                same = view[start:end] == b"\7" * (end - start)
                assert same, f"The memory changed bytes [{start}, {end}), which were written after on_ready"

    def test_a_view_from_before_the_start_stays_the_memory(self, memory: Memory) -> None:
        with memory.view() as before:
            self._started(memory)
            with memory.view() as after:
                _mark(after, 9)
            assert _wrong_page(before, 9) is None, "Views made before and after `start` show different bytes"

    # the end; the tests keep the closed objects: it is `close` that frees, not the garbage collector

    @pytest.mark.parametrize("when", ["before the start", "after all was usable"])
    def test_closing_releases_all(self, make_memory: MakeMemory, when: str) -> None:
        before = held(mappings=True)
        memory = make_memory(_CAPACITY)
        if when == "after all was usable":
            with self._started(memory).view() as view:
                view[-1] = 1
        self._must_close(memory, before, when)

    def test_closing_while_it_becomes_usable_ends_the_work(self, make_memory: MakeMemory) -> None:
        before = held(mappings=True)
        memory = make_memory(_CAPACITY)
        ends: list[int] = []
        late: list[int] = []
        closing, is_closed = threading.Event(), threading.Event()

        def on_ready(end: int) -> None:
            if is_closed.is_set():
                late.append(end)
            ends.append(end)
            closing.wait(self.patience_s)  # so that close() runs while the memory still becomes usable
            time.sleep(0.01)

        memory.start(on_ready)
        wait_until(lambda: ends, "the first on_ready", self.patience_s)
        closing.set()
        self._must_close(memory, before, "while it became usable", is_closed.set)
        assert not late, "The memory called on_ready after close()"

    def test_closing_twice_closes_nothing_of_others(self, make_memory: MakeMemory) -> None:
        memory = make_memory(_CAPACITY)
        number = memory.fd
        memory.close()
        other = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        if other != number:
            os.dup2(other, number, inheritable=False)
            os.close(other)
        self._in_time(memory.close, "a second close()")
        try:
            os.close(number)
        except OSError:
            pytest.fail("A second `close` closed a descriptor that another file had taken over")

    def test_leaving_is_quick_while_views_are_there(self, make_memory: MakeMemory) -> None:
        """The process ends right afterwards. A `BufferError` is fine: the memory stays until then."""
        memory = self._started(make_memory(_CAPACITY))
        name = _name_of(memory)
        with memory.view() as view:
            with contextlib.suppress(BufferError):
                self._in_time(memory.leave, "leave()")
            view[0] = 1
        memory.close()
        assert not (name and os.path.exists(name)), f"The file {name} remains after leave() and close()"

    def _in_time(self, call: Callable[[], None], what: str) -> None:
        began = time.monotonic()
        try:
            call()
        except BufferError:
            raise
        except Exception as error:  # noqa: BLE001  any is the bug
            pytest.fail(f"{what} raised {type(error).__name__}: {error}; `close` and `leave` must be idempotent")
        assert time.monotonic() - began < self.patience_s, f"{what} took longer than {self.patience_s:g} s"

    def _must_close(
        self, memory: Memory, before: set[str], when: str, closed: Callable[[], None] = lambda: None
    ) -> None:
        name = _name_of(memory)
        self._in_time(memory.close, "close()")
        closed()
        threads = sorted(each for each in held(mappings=True) - before if each.startswith("thread "))
        assert not threads, f"`close` {when} returned before {', '.join(threads)} had ended"
        end = time.monotonic() + min(self.patience_s, 5.0)
        while (left := held(mappings=True) - before) and time.monotonic() < end:
            time.sleep(0.005)
        assert not left, f"`close` {when} left open: {', '.join(sorted(left))}"
        assert not (name and os.path.exists(name)), f"`close` {when} left the file {name}"
        self._in_time(memory.close, "a second close()")

    # memory that outlives its server; skipped for a provider without `keeps`

    @pytest.mark.parametrize("size", _SIZES)
    def test_kept_memory_shows_the_same_bytes(
        self, make_kept_memory: MakeKeptMemory, make_memory: MakeMemory, size: str
    ) -> None:
        """From its first moment on, beside an engine that still maps what the earlier server gave it."""
        kept, engines = self._of_an_earlier_server(make_memory, _SIZES[size])
        with engines:
            before, was = zlib.crc32(engines), os.fstat(kept)
            with contextlib.closing(make_kept_memory(_SIZES[size], kept)) as memory:
                assert memory.capacity == len(engines), f"`capacity` is {memory.capacity}, expected {len(engines)}"
                with memory.view() as view:
                    assert _wrong_page(view, 4) is None, "Kept memory shows other bytes before start()"
                    ends: list[int] = []
                    memory.start(ends.append)
                    self._until_all_is_ready(memory, ends)
                    assert ends == sorted(set(ends)), f"n of on_ready(n) must grow at each call: {ends[:8]}"
                    assert zlib.crc32(view) == before, "Kept memory changed between start() and the last on_ready"
                    _mark(view, 6)
                with mmap.mmap(memory.fd, len(engines)) as client, memoryview(client) as seen:
                    assert _wrong_page(seen, 6) is None, "`fd` and view() of kept memory show different bytes"
                # The journal names the arena's file, and the kernel's locks are on it.
                assert os.path.samestat(os.fstat(memory.fd), was), "`fd` must be the kept file"
                assert not os.get_inheritable(memory.fd), "`fd` of kept memory is inheritable"

    @pytest.mark.parametrize("started", [False, True], ids=["before the start", "after all is usable"])
    def test_closing_kept_memory_releases_all(
        self, make_kept_memory: MakeKeptMemory, make_memory: MakeMemory, started: bool
    ) -> None:
        with _leaving_nothing("close() of kept memory"):
            kept, engines = self._of_an_earlier_server(make_memory, _CAPACITY)
            engines.close()
            memory = make_kept_memory(_CAPACITY, kept)
            if started:
                self._started(memory)
            memory.close()

    def test_kept_memory_of_another_size_is_refused(
        self, make_kept_memory: MakeKeptMemory, make_memory: MakeMemory
    ) -> None:
        """A mapping beyond its end would end the server."""
        with _leaving_nothing("an ArenaError for kept memory"):
            kept, engines = self._of_an_earlier_server(make_memory, _SIZES["1 MiB"])
            engines.close()
            must_refuse(
                "Making 40 MiB of kept memory of 1 MiB", lambda: make_kept_memory(_CAPACITY, kept).close(), ArenaError
            )

    def _of_an_earlier_server(self, make_memory: MakeMemory, capacity: int) -> tuple[int, mmap.mmap]:
        """Return what a keeper has of memory whose server has ended, and an engine's mapping; pages are marked by 4."""
        memory = self._started(make_memory(capacity))
        with memory.view() as view:
            pattern = bytes(range(1, 252)) * (4 << 10)
            for start in range(0, len(view), len(pattern)):
                view[start : start + len(pattern)] = pattern[: len(view) - start]
            _mark(view, 4)
        kept = own_description(memory.fd)
        engines = mmap.mmap(memory.fd, int(memory.capacity))
        memory.close()
        return kept, engines


@contextlib.contextmanager
def _leaving_nothing(what: str) -> Iterator[None]:
    before = held(mappings=True)
    yield
    left = held(mappings=True) - before
    assert not left, f"{what} left open: {', '.join(sorted(left))}"


def _mark(view: memoryview, number: int) -> None:
    for end in range(len(view) % _PAGE or _PAGE, len(view) + 1, _PAGE):
        view[end - 8 : end] = (end * 31 + number).to_bytes(8, "little")


def _wrong_page(view: memoryview, number: int) -> int | None:
    for end in range(len(view) % _PAGE or _PAGE, len(view) + 1, _PAGE):
        if view[end - 8 : end] != (end * 31 + number).to_bytes(8, "little"):
            return end - 8
    return None


def _taken(fd: int) -> int | None:
    found = os.fstat(fd)
    return found.st_blocks * 512 if stat.S_ISREG(found.st_mode) else None


def _name_of(memory: Memory) -> str:
    path = os.readlink(f"/proc/self/fd/{memory.fd}")
    return path if path.startswith("/dev/shm/") and not path.endswith(" (deleted)") else ""  # noqa: S108
