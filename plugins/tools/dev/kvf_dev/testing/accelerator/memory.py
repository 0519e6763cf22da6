"""The addresses of one process on a simulated node: the memory of each, and whether it is still valid."""

from __future__ import annotations

import bisect
import mmap
import secrets
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from kvf_dev.testing.accelerator.node import AcceleratorError, ContextLost, Ledger, Mistake, Misuse, merged

_PROCESS_BITS = 44
_ALIGNMENT = 512


@dataclass
class Region:
    """Addresses of this process: `nbytes` at `start` of the device. `mapping` is the row of memory of others."""

    address: int
    nbytes: int
    device: str
    start: int
    allocation: int
    mapping: int | None
    ended: Literal["", "freed", "closed"] = ""


class Fragments(NamedTuple):
    """Pieces of `length` bytes of a device's memory, and the regions that they lie in."""

    places: list[int]
    length: int
    regions: list[Region]


class DeviceMemory:
    """The allocations and open mappings of one process, and the only access to the devices' bytes. Addresses are never
    used again, so that those of freed memory stay invalid. Thread-safe."""

    def __init__(self, directory: Path) -> None:
        self._ledger = Ledger(directory)
        rows = self._ledger.all("select uuid, max_delay_s from devices order by number")
        self.devices: Sequence[str] = tuple(device for device, _ in rows)
        self.max_delay_s: float = rows[0][1]
        self.process = self._ledger.enter()
        self._lock = threading.RLock()
        self._poisoned = ""
        self._next = self.process << _PROCESS_BITS | 1 << 21
        self._regions: list[Region] = []  # by address
        self._pinned: list[tuple[int, int]] = []
        self._memory: dict[str, mmap.mmap] = {}
        for device in self.devices:
            with (directory / device).open("r+b") as file:
                self._memory[device] = mmap.mmap(file.fileno(), 0)

    def poison(self, reason: str) -> None:
        self._poisoned = self._poisoned or reason

    def check(self, device: str) -> None:
        """Raise `ContextLost` if this process can no longer use the device, `AcceleratorError` if there is none."""
        if self._poisoned:
            raise ContextLost(self._poisoned)
        row = self._ledger.one("select vanished from devices where uuid = ?", device)
        if row is None:
            raise AcceleratorError(f"there is no device {device}")
        if row[0]:
            raise ContextLost(f"device {device} has vanished")

    def allocate(self, device: str, nbytes: int) -> int:
        """Return the address of new memory. It is meaningless to the host and to other processes."""
        self.check(device)
        with self._lock, self._ledger.change():
            start = 0
            for at, size, owner, allocation, freed in self._ledger.all(
                "select start, nbytes, process, id, freed from allocations where device = ? order by start", device
            ):
                # Memory that is open in a process, or that a living process has not freed, is not reused.
                is_open = self._ledger.one("select 1 from mappings where allocation = ?", allocation) is not None
                if not is_open and (freed or not self._ledger.lives(owner)):
                    continue
                if at >= start + nbytes:
                    break
                start = max(start, _aligned(at + size))
            if start + nbytes > len(self._memory[device]):
                raise AcceleratorError(f"out of memory: {nbytes} bytes of device {device}")
            token = secrets.token_bytes(16)
            row = self._ledger.insert(
                "insert into allocations values(null, ?, ?, ?, ?, ?, 0)", device, self.process, start, nbytes, token
            )
            return self._add(nbytes, device, start, row, None)

    def free(self, address: int) -> None:
        region = self._end(address, "freed")
        self._ledger.all("update allocations set freed = 1 where id = ?", region.allocation)
        self._memory[region.device][region.start : region.start + region.nbytes] = b"\xdd" * region.nbytes

    def export_memory(self, address: int) -> tuple[str, bytes, int, int]:
        """Return the device of the allocation around `address`, its handle, its size, and the offset of `address`."""
        region = self.region(address, "export")
        self.check(region.device)
        if region.mapping is not None:
            raise AcceleratorError("export: the memory belongs to another process")
        (handle,) = self._ledger.one("select token from allocations where id = ?", region.allocation)
        return region.device, handle, region.nbytes, address - region.address

    def open_memory(self, device: str, handle: bytes, nbytes: int = 0) -> int:
        """Return the address here of another process's allocation, which has at least `nbytes`."""
        self.check(device)
        row = self._ledger.one(
            "select id, device, process, start, nbytes, freed from allocations where token = ?", handle
        )
        if row is None:
            raise AcceleratorError("open: the handle names no allocation")
        number, owner_device, process, start, size, freed = row
        if process == self.process:
            raise self._misuse("wrong_process", "open: a process cannot open its own handle")
        if owner_device != device:
            raise AcceleratorError(f"open: the memory is on {owner_device}, not on {device}")
        if freed or not self._ledger.lives(process):
            raise AcceleratorError("open: the memory was freed, or its process has ended")
        if nbytes > size:
            raise AcceleratorError(f"open: the allocation has {size} bytes, not {nbytes}")
        row = self._ledger.insert("insert into mappings(allocation, process) values(?, ?)", number, self.process)
        return self._add(size, device, start, number, row)

    def close_memory(self, address: int) -> None:
        region = self._end(address, "closed")
        self._ledger.all("delete from mappings where id = ?", region.mapping)

    def pin(self, offset: int, nbytes: int) -> None:
        with self._lock:
            self._pinned = merged([*self._pinned, (offset, offset + nbytes)])

    def region(self, address: int, what: str) -> Region:
        if (owner := address >> _PROCESS_BITS) != self.process:
            raise self._misuse("wrong_process", f"{what}: {address:#x} is an address of process {owner}")
        with self._lock:
            at = bisect.bisect_right(self._regions, address, key=lambda region: region.address) - 1
            if at < 0 or address >= self._regions[at].address + self._regions[at].nbytes:
                raise self._misuse("out_of_bounds", f"{what}: no allocation contains {address:#x}")
            region = self._regions[at]
        self._check_here(region, what)
        return region

    def check_live(self, fragments: Fragments, what: str) -> None:
        """Raise `Misuse` if the memory is invalid: freed or closed here, or freed by its owner."""
        for region in fragments.regions:
            self._check_here(region, what)
            if self._ledger.one("select 1 from allocations where id = ? and freed", region.allocation):
                raise self._misuse("use_after_free", f"{what}: the owner has freed this memory")

    def fragments(self, addresses: Sequence[int], length: int, device: str, what: str) -> Fragments:
        regions: dict[int, Region] = {}
        places = []
        region: Region | None = None
        for address in addresses:
            if region is None or not region.address <= address < region.address + region.nbytes:
                region = self.region(address, what)
                regions[region.address] = region
                if region.device != device:
                    raise self._misuse("wrong_device", f"{what}: memory on {region.device}, a stream on {device}")
            if address + length > region.address + region.nbytes:
                raise self._misuse("out_of_bounds", f"{what}: {length} bytes go past the end of the allocation")
            places.append(address - region.address + region.start)
        return Fragments(places, length, list(regions.values()))

    def _check_here(self, region: Region, what: str) -> None:
        if region.ended:
            kind: Mistake = "use_after_free" if region.ended == "freed" else "use_after_close"
            raise self._misuse(kind, f"{what}: the memory at {region.address:#x} was {region.ended}")

    def _end(self, address: int, how: Literal["freed", "closed"]) -> Region:
        with self._lock:
            region = self.region(address, how)
            if (region.mapping is not None) is not (how == "closed") or region.address != address:
                made = "opened" if how == "closed" else "allocated"
                raise AcceleratorError(f"{how}: the address is not the start of memory that was {made}")
            region.ended = how
            return region

    def _add(self, nbytes: int, device: str, start: int, allocation: int, mapping: int | None) -> int:
        with self._lock:
            region = Region(self._next, nbytes, device, start, allocation, mapping)
            # As on real devices, one allocation may follow another, and a fragment over the end of one is a mistake.
            self._next += _aligned(nbytes)
            self._regions.append(region)
            return region.address

    def _misuse(self, kind: Mistake, text: str) -> Misuse:
        return self._ledger.misuse(self.process, kind, text)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
