"""How much of the arena may be used while several threads pin it."""

from __future__ import annotations

import threading

import pytest

from kvf_devices.copier import THREADS, Pinning
from kvframework.errors import DeviceError

SLICE = 4
SIZE = 2 * THREADS * SLICE - 1
STUCK_S = 20.0


class Pins:
    """Its slices are pinned at the same moment, as many as there are threads; from `fails_at` on none is."""

    def __init__(self, fails_at: int = SIZE) -> None:
        self.pinned: list[tuple[int, int]] = []
        self._fails_at = fails_at
        self._together = threading.Barrier(THREADS)

    def pin(self, offset: int, nbytes: int) -> None:
        self._together.wait(STUCK_S)
        if offset >= self._fails_at:
            raise DeviceError("no more memory may be locked")
        self.pinned.append((offset, nbytes))


def pin_all(driver: Pins) -> Pinning:
    made = Pinning(driver, SIZE, SLICE)  # type: ignore[arg-type]
    made._run()
    return made


def test_every_byte_is_pinned_once() -> None:
    driver = Pins()
    assert pin_all(driver).usable() == SIZE
    ends = [0, *(offset + nbytes for offset, nbytes in sorted(driver.pinned))]
    assert [offset for offset, _ in sorted(driver.pinned)] == ends[:-1]
    assert ends[-1] == SIZE


def test_what_lies_before_a_slice_that_failed_is_usable() -> None:
    made = pin_all(Pins(fails_at=5 * SLICE))
    assert made.usable() == 5 * SLICE
    with pytest.raises(DeviceError, match="no more memory may be locked"):
        made.check()
