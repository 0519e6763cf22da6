"""The kit over memory of L1 that is wrong in one way each. Run by pytest outside of the repository; every class but the
first must fail."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable
from typing import ClassVar

import pytest

from kvframework.api.memory import Memory
from kvframework.testing import MemoryConformance

STEP = 1 << 20


class Right(Memory):
    flags = os.MFD_CLOEXEC
    leaked: ClassVar[list[int]] = []

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.fd = os.memfd_create("kit", self.flags)
        os.ftruncate(self.fd, capacity)
        self._map = self.mapped()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def mapped(self) -> mmap.mmap:
        return mmap.mmap(self.fd, self.capacity)

    def start(self, on_ready: Callable[[int], None]) -> None:
        self._thread = threading.Thread(target=self.work, args=(on_ready,))
        self._thread.start()

    def work(self, on_ready: Callable[[int], None]) -> None:
        for end in self.ends():
            if self._closing.is_set():
                return
            self.touch(end)
            on_ready(end)

    def ends(self) -> list[int]:
        return [*range(STEP, self.capacity, STEP), self.capacity]

    def touch(self, end: int) -> None:
        pass

    def view(self) -> memoryview:
        return memoryview(self._map)

    def close(self) -> None:
        self._closing.set()
        if self._thread is not None:
            self._thread.join()
        if self.fd >= 0:
            self._map.close()
            os.close(self.fd)
            self.fd = -1


class TestRightMemory(MemoryConformance):
    @pytest.fixture
    def make_memory(self) -> type[Right]:
        return Right


class TestNoMemory(MemoryConformance):
    pass


class Planted(MemoryConformance):
    patience_s = 1.5
    Bug: type[Right]

    @pytest.fixture
    def make_memory(self) -> type[Right]:
        return self.Bug


class TestSmaller(Planted):
    class Bug(Right):
        def __init__(self, capacity: int) -> None:
            super().__init__(capacity - 4096)


class TestReadOnlyView(Planted):
    class Bug(Right):
        def view(self) -> memoryview:
            return super().view().toreadonly()


class TestACopyForEachView(Planted):
    class Bug(Right):
        def view(self) -> memoryview:
            return memoryview(bytearray(super().view()))


class TestPrivateMapping(Planted):
    class Bug(Right):
        def mapped(self) -> mmap.mmap:
            return mmap.mmap(self.fd, self.capacity, flags=mmap.MAP_PRIVATE)


class TestInherited(Planted):
    class Bug(Right):
        def __init__(self, capacity: int) -> None:
            super().__init__(capacity)
            os.set_inheritable(self.fd, True)


class TestReadyInStart(Planted):
    class Bug(Right):
        def start(self, on_ready: Callable[[int], None]) -> None:
            self.work(on_ready)


class TestNeverWhole(Planted):
    class Bug(Right):
        def ends(self) -> list[int]:
            return super().ends()[:-1]


class TestBackwards(Planted):
    class Bug(Right):
        def ends(self) -> list[int]:
            return [2 * STEP, STEP, self.capacity]


class TestClearsWhatIsInUse(Planted):
    class Bug(Right):
        def touch(self, end: int) -> None:
            start = max(end - STEP - 1, 0)
            self._map[start:end] = bytes(end - start)


class TestGoesOnAfterClose(Planted):
    class Bug(Right):
        def start(self, on_ready: Callable[[int], None]) -> None:
            threading.Thread(target=self.work, args=(on_ready,), daemon=True).start()

        def work(self, on_ready: Callable[[int], None]) -> None:
            for end in self.ends():
                on_ready(end)


class TestKeepsTheDescriptor(Planted):
    class Bug(Right):
        def close(self) -> None:
            if self.fd >= 0:
                self.leaked.append(os.dup(self.fd))
            super().close()


class TestClosesTwice(Planted):
    class Bug(Right):
        def close(self) -> None:
            os.close(self.fd)
            self._map.close()
