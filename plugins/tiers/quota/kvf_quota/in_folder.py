"""What a folder knows of the values of tenants with a quota: a file beside the values, which servers lock by turns.

The file holds each tenant's bytes, its salts, and by server what is on its way into the folder. A sum may be too high,
as values leave the folder otherwise: it is counted again before values make room, and every ten minutes. A promise is
the time of the value's file, which lies ahead.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from kvf_filesystem import FilesystemOptions
from kvf_filesystem.form import place_of
from kvf_filesystem.root import Root
from kvf_filesystem.tier import FilesystemTier
from kvframework.api.tier import Outcome, PackedKey, Terms, TierEntry, TierUsage
from kvframework.errors import TierError

NAME = "kvframework-tenants"
# The salt in a key, see `kvframework.api.keys`.
SALT = slice(16, 32)
MOST_SALTS, MOST_BYTES = 4096, 16 << 20
COUNT_S, LOOK_S = 600.0, 5.0
# Until when values of a server that has ended count as on their way; and the part of a quota that is freed at once.
WAY_S, FREED = 60.0, 64
_TURN_S = 0.002


class Tenant(msgspec.Struct):
    """`held` bytes with those on their way, counted at `at`; `kept` are promised. `way`: bytes and time by server."""

    held: int = 0
    kept: int = 0
    at: float = 0.0
    salts: list[str] = []
    way: dict[str, tuple[int, float]] = {}


Tenants = dict[str, Tenant]


class FolderLedger:
    """`scan` and `delete` are the tier's. Thread-safe; calls raise `OSError` and `TierError`."""

    def __init__(
        self,
        scan: Callable[..., Iterator[TierEntry]],
        delete: Callable[..., list[Outcome]],
    ) -> None:
        self._scan, self._delete, self._token = scan, delete, secrets.token_hex(8)
        self._lock = threading.Lock()
        self._way: dict[PackedKey, tuple[str, int]] = {}
        self._sums: Mapping[str, object] = {}
        self._looked_at = -LOOK_S

    def admit(self, root: Root, terms: Sequence[Terms], deadline: float) -> list[Outcome]:
        put = [one for one in terms if not one.until]
        answers = {one.key: keep(root, one) for one in terms if one.until}
        with self._opened(root, deadline) as tenants:
            for one in terms:
                salts = tenants.setdefault(one.tenant, Tenant()).salts
                salt = one.key[SALT].hex()
                if salt not in salts and len(salts) < MOST_SALTS:
                    salts.append(salt)
            self._give_back(tenants, [one.key for one in put], free=True)  # whose put was not tried
            for tenant in {one.tenant for one in put}:
                self._make_room(tenants, tenant, [one for one in put if one.tenant == tenant], deadline)
            for one in put:
                row = tenants[one.tenant]
                fits = row.held + one.nbytes <= one.most
                answers[one.key] = Outcome.STORED if fits else Outcome.FAILED
                if fits:
                    row.held += one.nbytes
                    self._on_its_way(row, one.nbytes)
                    self._way[one.key] = one.tenant, one.nbytes
        return [answers[one.key] for one in terms]

    def awaits(self, keys: Sequence[PackedKey]) -> bool:
        """Return whether one of these values was admitted, and is not settled."""
        return any(key in self._way for key in keys)

    def settle(self, root: Root, keys: Sequence[PackedKey], deadline: float) -> None:
        """Take note that values are in the folder, or not put after all."""
        with self._opened(root, deadline) as tenants:
            self._give_back(tenants, keys)

    def look(self, root: Root) -> None:
        """Read the sums once in a while, as others may have changed them."""
        if time.monotonic() - self._looked_at < LOOK_S:
            return
        self._looked_at = time.monotonic()
        with contextlib.suppress(FileNotFoundError):
            fd = os.open(NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=root.fd)
            try:
                self._note(_read(fd))
            finally:
                os.close(fd)

    def _note(self, tenants: Tenants) -> None:
        self._sums = {name: {"bytes": row.held, "kept_bytes": row.kept} for name, row in tenants.items()}

    def status(self) -> dict[str, object]:
        return {"tenants": self._sums} if self._sums else {}

    def _give_back(self, tenants: Tenants, keys: Sequence[PackedKey], *, free: bool = False) -> None:
        for key in keys:
            tenant, nbytes = self._way.pop(key, ("", 0))
            if nbytes and tenant in tenants:
                self._on_its_way(tenants[tenant], -nbytes)
                tenants[tenant].held -= nbytes if free else 0

    def _on_its_way(self, row: Tenant, nbytes: int) -> None:
        before = row.way.get(self._token, (0, 0.0))[0]
        row.way[self._token] = max(before + nbytes, 0), time.time()

    def _make_room(self, tenants: Tenants, tenant: str, terms: Sequence[Terms], deadline: float) -> None:
        most, needed = terms[0].most, sum(one.nbytes for one in terms)
        row = tenants[tenant]
        if row.held + needed <= most and time.time() - row.at < COUNT_S:
            return
        values = self._count(tenants, tenant, deadline)
        if row.held + needed <= most:
            return
        leaving, excess = [], row.held + needed - most + most // FREED
        for each in values:
            if excess <= 0:
                break
            leaving.append(each)
            excess -= each.nbytes
        outcomes = self._delete([each.key for each in leaving], deadline=deadline)
        gone = [each.nbytes for each, outcome in zip(leaving, outcomes, strict=True) if outcome is not Outcome.FAILED]
        row.held -= sum(gone)

    def _count(self, tenants: Tenants, tenant: str, deadline: float) -> list[TierEntry]:
        """Count the bytes of all tenants; return one's values that are not promised, the least recently used first."""
        now, held, kept = time.time(), Counter[str](), Counter[str]()
        of_salt = {bytes.fromhex(salt): name for name, row in tenants.items() for salt in row.salts}
        found: list[TierEntry] = []
        for each in self._scan(deadline=deadline):
            name = of_salt.get(each.key[SALT])
            if name is not None:
                promised = (each.used_at or 0.0) > now
                held[name] += each.nbytes
                kept[name] += each.nbytes * promised
                if name == tenant and not promised:
                    found.append(each)
        for name, row in tenants.items():
            row.way = {server: each for server, each in row.way.items() if now - each[1] < WAY_S and each[0]}
            row.held, row.kept, row.at = held[name] + sum(each[0] for each in row.way.values()), kept[name], now
        return sorted(found, key=lambda each: each.used_at or 0.0)

    @contextmanager
    def _opened(self, root: Root, deadline: float) -> Iterator[Tenants]:
        """The content of the file, locked, and written behind the block."""
        left = deadline - time.monotonic()
        if not self._lock.acquire(timeout=max(left, 0.0)):
            raise TierError("other calls kept the tenants' file locked until the deadline")
        try:
            fd = os.open(NAME, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=root.fd)
            try:
                _lock(fd, deadline)
                tenants = _read(fd)
                yield tenants
                written = msgspec.json.encode(tenants)
                os.pwrite(fd, written, 0)
                os.ftruncate(fd, len(written))
            finally:
                os.close(fd)
            self._note(tenants)
        finally:
            self._lock.release()


def keep(root: Root, terms: Terms) -> Outcome:
    """Let a value be kept: the time of its file lies ahead, and a disk has both. Raises `OSError`."""
    folder, name = place_of(terms.key)
    try:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=root.folders.now(folder))
    except FileNotFoundError:
        return Outcome.MISSING
    try:
        found = os.fstat(fd)
        if found.st_size > terms.most or found.st_nlink != 1:
            return Outcome.FAILED
        os.utime(fd, (terms.until, max(found.st_mtime, terms.until)))
        os.fsync(fd)
        os.fsync(root.folders.now(folder))
    finally:
        os.close(fd)
    return Outcome.STORED


def _lock(fd: int, deadline: float) -> None:
    while True:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        if time.monotonic() >= deadline:
            raise TierError("other servers kept the tenants' file locked until the deadline")
        time.sleep(_TURN_S)


def _read(fd: int) -> dict[str, Any]:
    """The tenants; none of a file that a crash has torn, which is written again."""
    content = os.pread(fd, MOST_BYTES, 0)
    try:
        return msgspec.json.decode(content, type=Tenants) if content else {}
    except msgspec.MsgspecError:
        return {}


class QuotaFolder(FilesystemTier):
    """The tier `filesystem` with quotas and promises."""

    def __init__(self, root: Root, options: FilesystemOptions, *, where: str) -> None:
        super().__init__(root, options, where=where)
        self._quotas = FolderLedger(self.scan, self.delete)

    def admit(self, terms: Sequence[Terms], *, deadline: float) -> list[Outcome]:
        return self._run(lambda root, _limit: self._quotas.admit(root, terms, deadline), deadline)

    def put(
        self, keys: Sequence[PackedKey], parts: Sequence[Sequence[memoryview]], *, deadline: float
    ) -> list[Outcome]:
        try:
            return super().put(keys, parts, deadline=deadline)
        finally:
            if self._quotas.awaits(keys):
                self._run(lambda root, _limit: self._quotas.settle(root, keys, deadline), deadline)

    def status(self) -> dict[str, object]:
        return self._quotas.status()

    def usage(self, *, deadline: float) -> TierUsage:
        self._run(lambda root, _limit: self._quotas.look(root), deadline)
        return super().usage(deadline=deadline)
