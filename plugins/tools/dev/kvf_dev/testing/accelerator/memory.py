"""The addresses of one process on a simulated node: the memory of each, and whether it is still valid."""

from __future__ import annotations

import bisect
import mmap
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from kvf_dev.testing.accelerator.node import AcceleratorError, Ledger, Misuse, Spans, merged

_PROCESS_BITS = 44
_ALIGNMENT = 512


class Region(NamedTuple):
    """A range of this process's addresses: `nbytes` from `address`, lying at `start` of the device's memory."""

    address: int
    nbytes: int
    device: str
    start: int
    allocation: int
    mapping: int | None  # its row; None for memory of this process


class AddressSpace:
    """The allocations and open mappings of one process, and the only access to the devices' bytes."""

    def __init__(self, directory: Path, ledger: Ledger, process: int, devices: Sequence[str]) -> None:
        self._ledger = ledger
        self._process = process
        self._next = process << _PROCESS_BITS | 1 << 21
        self._regions: list[Region] = []
        self._ended: list[tuple[Region, str]] = []
        self._memory: dict[str, mmap.mmap] = {}
        for device in devices:
            with (directory / device).open("r+b") as file:
                self._memory[device] = mmap.mmap(file.fileno(), 0)

    def allocate(self, device: str, nbytes: int, token: bytes) -> int:
        """Return the address of new memory of this process. Raises `AcceleratorError` if too little is left."""
        with self._ledger.change():
            taken = self._ledger.all(
                "select start, nbytes, process, id, freed from allocations where device = ? order by start", device
            )
            start = 0
            for at, size, owner, allocation, freed in taken:
                # Memory that is open in a process, or that a living process has not freed, is not reused.
                used = self._ledger.one("select 1 from mappings where allocation = ?", allocation) is not None
                if not used and (freed or not self._ledger.lives(owner)):
                    continue
                if at >= start + nbytes:
                    break
                start = max(start, -(-(at + size) // _ALIGNMENT) * _ALIGNMENT)
            if start + nbytes > len(self._memory[device]):
                raise AcceleratorError(f"out of memory: {nbytes} bytes of device {device}")
            row = self._ledger.insert(
                "insert into allocations(device, process, start, nbytes, token) values(?, ?, ?, ?, ?)",
                device,
                self._process,
                start,
                nbytes,
                token,
            )
        return self._add(nbytes, device, start, row, None)

    def free(self, address: int) -> None:
        region = self.region(address, "free")
        if region.mapping is not None or region.address != address:
            raise AcceleratorError("free: this is no beginning of an allocation of this process")
        self._end(region, "was freed")
        self._ledger.run("update allocations set freed = 1 where id = ?", region.allocation)
        self._memory[region.device][region.start : region.start + region.nbytes] = b"\xdd" * region.nbytes

    def map(self, device: str, start: int, nbytes: int, allocation: int) -> int:
        """Return the address of another process's allocation here."""
        row = self._ledger.insert("insert into mappings(allocation, process) values(?, ?)", allocation, self._process)
        return self._add(nbytes, device, start, allocation, row)

    def unmap(self, address: int) -> None:
        region = self.region(address, "close")
        if region.mapping is None or region.address != address:
            raise AcceleratorError("close: this is no beginning of memory that was opened")
        self._end(region, "was closed")
        self._ledger.run("delete from mappings where id = ?", region.mapping)

    def region(self, address: int, what: str) -> Region:
        """Return the region of an address. Raises `Misuse` if it has none."""
        at = bisect.bisect_right(self._regions, address, key=lambda region: region.address) - 1
        if at >= 0 and address < self._regions[at].address + self._regions[at].nbytes:
            return self._regions[at]
        raise self._wrong(address, what)

    def check_live(self, region: Region, what: str) -> None:
        """Raise `Misuse` if the memory is invalid: freed by its owner, or closed here."""
        if region not in self._regions:
            raise self._wrong(region.address, what)
        if region.mapping is not None:
            row = self._ledger.one("select freed from allocations where id = ?", region.allocation)
            if row is None or row[0]:
                raise self._misuse("use_after_free", f"{what}: its owner has freed this memory")

    def spans(self, addresses: Sequence[int], length: int, device: str, what: str) -> tuple[Spans, list[Region]]:
        """Return the device memory that the fragments touch, and their regions. Raises `Misuse`."""
        regions: dict[int, Region] = {}
        spans = []
        region: Region | None = None
        for address in addresses:
            if region is None or not region.address <= address < region.address + region.nbytes:
                region = self.region(address, what)
                regions[region.address] = region
                if region.device != device:
                    raise self._misuse("wrong_device", f"{what}: memory of {region.device} on a stream of {device}")
            if address + length > region.address + region.nbytes:
                raise self._misuse("out_of_bounds", f"{what}: {length} bytes run over the end of an allocation")
            at = address - region.address + region.start
            spans.append((at, at + length))
        return merged(iter(spans)), list(regions.values())

    def offset(self, address: int, what: str) -> int:
        region = self.region(address, what)
        return address - region.address + region.start

    def bytes_of(self, device: str) -> mmap.mmap:
        return self._memory[device]

    def close(self) -> None:
        for region in list(self._regions):
            if region.mapping is not None:
                self._ledger.run("delete from mappings where id = ?", region.mapping)
            else:
                self._ledger.run("update allocations set freed = 1 where id = ?", region.allocation)
        self._regions.clear()
        for memory in self._memory.values():
            memory.close()

    def _add(self, nbytes: int, device: str, start: int, allocation: int, mapping: int | None) -> int:
        region = Region(self._next, nbytes, device, start, allocation, mapping)
        # Addresses are never reused, so that those of freed memory stay invalid. As on real devices, one allocation may
        # follow another, and a fragment over the end of one is a mistake all the same.
        self._next += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        bisect.insort(self._regions, region)
        return region.address

    def _end(self, region: Region, how: str) -> None:
        self._regions.remove(region)
        self._ended.append((region, how))

    def _wrong(self, address: int, what: str) -> Misuse:
        owner = address >> _PROCESS_BITS
        if owner != self._process:
            return self._misuse("wrong_process", f"{what}: {address:#x} is an address of process {owner}")
        for region, how in self._ended:
            if region.address <= address < region.address + region.nbytes:
                kind = "use_after_free" if how == "was freed" else "use_after_close"
                return self._misuse(kind, f"{what}: the memory at {address:#x} {how}")
        return self._misuse("out_of_bounds", f"{what}: there is no memory at {address:#x}")

    def _misuse(self, kind: str, text: str) -> Misuse:
        self._ledger.violated(self._process, kind, text)
        return Misuse(kind, text)
