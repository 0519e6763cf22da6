"""The addresses of one process on a simulated node: the memory of each, and whether it is still valid."""

from __future__ import annotations

import bisect
import mmap
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from kvf_dev.testing.accelerator.node import AcceleratorError, Ledger, Mistake, Misuse

_PROCESS_BITS = 44
_ALIGNMENT = 512


@dataclass
class Region:
    """A range of this process's addresses: `nbytes` from `address`, lying at `start` of the device's memory. `mapping`
    is the row of memory of another process."""

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


class AddressSpace:
    """The allocations and open mappings of one process, and the only access to the devices' bytes. Addresses are never
    used again, so that those of freed memory stay invalid."""

    def __init__(self, directory: Path, ledger: Ledger, process: int, devices: Sequence[str]) -> None:
        self._ledger = ledger
        self._process = process
        self._next = process << _PROCESS_BITS | 1 << 21
        self._regions: list[Region] = []  # by address
        self.memory: dict[str, mmap.mmap] = {}
        for device in devices:
            with (directory / device).open("r+b") as file:
                self.memory[device] = mmap.mmap(file.fileno(), 0)

    def allocate(self, device: str, nbytes: int) -> int:
        """Return the address of new memory of this process. Raises `AcceleratorError` if too little is left."""
        with self._ledger.change():
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
            if start + nbytes > len(self.memory[device]):
                raise AcceleratorError(f"out of memory: {nbytes} bytes of device {device}")
            token = secrets.token_bytes(16)
            row = self._ledger.insert(
                "insert into allocations values(null, ?, ?, ?, ?, ?, 0)", device, self._process, start, nbytes, token
            )
        return self._add(nbytes, device, start, row, None)

    def free(self, address: int) -> None:
        region = self._beginning(address, "free", is_mapping=False)
        region.ended = "freed"
        self._ledger.all("update allocations set freed = 1 where id = ?", region.allocation)
        self.memory[region.device][region.start : region.start + region.nbytes] = b"\xdd" * region.nbytes

    def map(self, device: str, start: int, nbytes: int, allocation: int) -> int:
        """Return the address of another process's allocation here."""
        row = self._ledger.insert("insert into mappings(allocation, process) values(?, ?)", allocation, self._process)
        return self._add(nbytes, device, start, allocation, row)

    def unmap(self, address: int) -> None:
        region = self._beginning(address, "close", is_mapping=True)
        region.ended = "closed"
        self._ledger.all("delete from mappings where id = ?", region.mapping)

    def region(self, address: int, what: str) -> Region:
        """Return the region of an address. Raises `Misuse` if it has none."""
        if (owner := address >> _PROCESS_BITS) != self._process:
            raise self._misuse("wrong_process", f"{what}: {address:#x} is an address of process {owner}")
        at = bisect.bisect_right(self._regions, address, key=lambda region: region.address) - 1
        if at < 0 or address >= self._regions[at].address + self._regions[at].nbytes:
            raise self._misuse("out_of_bounds", f"{what}: there is no memory at {address:#x}")
        region = self._regions[at]
        self._check_here(region, what)
        return region

    def check_live(self, fragments: Fragments, what: str) -> None:
        """Raise `Misuse` if the memory is invalid: freed or closed here, or freed by its owner."""
        for region in fragments.regions:
            self._check_here(region, what)
            if self._ledger.one("select 1 from allocations where id = ? and freed", region.allocation):
                raise self._misuse("use_after_free", f"{what}: its owner has freed this memory")

    def fragments(self, addresses: Sequence[int], length: int, device: str, what: str) -> Fragments:
        """Return where fragments lie in the device's memory. Raises `Misuse`."""
        regions: dict[int, Region] = {}
        places = []
        region: Region | None = None
        for address in addresses:
            if region is None or not region.address <= address < region.address + region.nbytes:
                region = self.region(address, what)
                regions[region.address] = region
                if region.device != device:
                    raise self._misuse("wrong_device", f"{what}: memory of {region.device} on a stream of {device}")
            if address + length > region.address + region.nbytes:
                raise self._misuse("out_of_bounds", f"{what}: {length} bytes run over the end of an allocation")
            places.append(address - region.address + region.start)
        return Fragments(places, length, list(regions.values()))

    def _check_here(self, region: Region, what: str) -> None:
        if region.ended:
            kind: Mistake = "use_after_free" if region.ended == "freed" else "use_after_close"
            raise self._misuse(kind, f"{what}: the memory at {region.address:#x} was {region.ended}")

    def _beginning(self, address: int, what: str, *, is_mapping: bool) -> Region:
        region = self.region(address, what)
        if (region.mapping is not None) is not is_mapping or region.address != address:
            made = "opened" if is_mapping else "allocated"
            raise AcceleratorError(f"{what}: this is no beginning of memory that was {made}")
        return region

    def _add(self, nbytes: int, device: str, start: int, allocation: int, mapping: int | None) -> int:
        region = Region(self._next, nbytes, device, start, allocation, mapping)
        # As on real devices, one allocation may follow another, and a fragment over the end of one is a mistake.
        self._next += _aligned(nbytes)
        self._regions.append(region)
        return region.address

    def _misuse(self, kind: Mistake, text: str) -> Misuse:
        return self._ledger.misuse(self._process, kind, text)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
