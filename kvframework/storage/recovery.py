"""What a keeper holds, at a server's start: the arena and the journal of an earlier server, if they pass every gate,
else new ones. Runs once, before anything is served."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from kvframework.api.keys import PackedKey
from kvframework.api.memory import Memory
from kvframework.errors import ArenaError
from kvframework.keeper.sd_notify import free_memory, free_unused
from kvframework.storage.l1 import journal as journals
from kvframework.storage.l1.journal import Cold, Identity, Journal

log = logging.getLogger(__name__)

ARENA, JOURNAL = "kvf-arena", "kvf-journal"
# Starts in a row that did not serve, after which the journal is ignored.
MAX_FAILED = 3
# A server that ends, and the copies of its copiers on a device.
LOCK_S = 10.0
_LOCK_STEP_S = 0.005
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Keeper(Protocol):
    """Who holds descriptors by name while no server lives, see `kvframework.keeper`; unless it `lasts`, only up to this
    server's end. Methods raise `OSError`."""

    @property
    def lasts(self) -> bool: ...

    def kept(self, names: Collection[str]) -> dict[str, int]:
        """Return the descriptors of these names that it held when this process began; others are closed."""

    def store(self, name: str, fd: int) -> None:
        """Have it hold a copy of a descriptor."""

    def remove(self, name: str) -> None:
        """Have it close a descriptor."""


class Recovery(NamedTuple):
    """The journal, owned by the caller, None without a keeper; what it has held before, None for a cold start, for the
    reason `why_cold`; and the seconds that finding out took."""

    journal: Journal | None = None
    found: journals.Found | None = None
    why_cold: str = ""
    seconds: float = 0.0

    @property
    def checksums(self) -> list[tuple[PackedKey, int]]:
        """Those of the objects that were held before, as far as they are known."""
        found = () if self.found is None else self.found.slots.objects
        return [(each.key, each.checksum) for each in found if each.checksum]


NOT_RECOVERED = Recovery(why_cold="no_keeper")


def recover(
    keeper: Keeper, identity: Identity, tenants: Sequence[str], create: Callable[[int | None], Memory]
) -> tuple[Memory, Recovery]:
    """Return the L1 memory and journal that the keeper holds, or new ones that it holds from now on. `create` makes the
    memory, over an arena that it owns from then on, or a new one. `identity` is that of this server, without the arena;
    `tenants` are the names of its tenants by number, from 1. Blocks up to `LOCK_S` for the end of an earlier server.
    Raises `ArenaError` if that does not end, and as `create`."""
    began = time.monotonic()
    held = keeper.kept((ARENA, JOURNAL))
    arena = -1
    try:
        if ARENA in held:
            arena = own_arena(held[ARENA])
        if held.keys() != {ARENA, JOURNAL}:
            raise Cold("incomplete" if held else "nothing_kept", ", ".join(held))
        journal, found = _open(held[JOURNAL], arena, identity, tenants)
    except Cold as cold:
        (log.warning if held else log.info)("L1 began empty: %s", cold)
        for name, fd in held.items():
            # Free it even if clients still map it: there is never memory for two arenas.
            free_memory(fd)
            _drop(keeper, name, fd)
        if arena >= 0:
            os.close(arena)
        return _new(keeper, identity, tenants, create, str(cold))
    for fd in held.values():
        os.close(fd)
    try:
        return create(arena), Recovery(journal, found, seconds=time.monotonic() - began)
    except BaseException:
        journal.close()
        raise


def free_recoverable(keeper: Keeper) -> None:
    """Free what the keeper holds, for a server that keeps nothing. What another server still uses ends with that."""
    held = keeper.kept((ARENA, JOURNAL))
    if ARENA in held:
        free_unused(held.values())
    for name, fd in held.items():
        _drop(keeper, name, fd)


def this_machine() -> str:
    """Return the id of the machine's boot. Raises `OSError`."""
    return _BOOT_ID.read_text(encoding="ascii").strip()


def _new(
    keeper: Keeper, identity: Identity, tenants: Sequence[str], create: Callable[[int | None], Memory], why_cold: str
) -> tuple[Memory, Recovery]:
    memory = create(None)
    with contextlib.ExitStack() as undo:
        try:
            journals.lock_for_server(memory.fd)
            journal = Journal.create(identity.of(memory.fd), tenants)
            undo.callback(journal.close)
            # A separate description: the lock ends with this server, not with the keeper.
            with os.fdopen(journals.own_description(memory.fd), "rb", buffering=0) as copy:
                for name, fd in ((ARENA, copy.fileno()), (JOURNAL, journal.fd)):
                    # systemd would keep both.
                    keeper.remove(name)
                    keeper.store(name, fd)
        except (OSError, ValueError) as error:
            why_cold = f"keeper_failed: {error}"
            log.error("L1 began empty, and the keeper will not keep it: %s", why_cold)
            return memory, Recovery(why_cold=why_cold)
        undo.pop_all()
    return memory, Recovery(journal, why_cold=why_cold)


def own_arena(fd: int) -> int:
    """Return the kept arena with this server's lock on it. Raises `Cold` for what is no file, and `ArenaError`."""
    try:
        own = journals.own_description(fd)
    except OSError as error:
        raise Cold("damaged", f"the kept arena cannot be opened: {error.strerror}") from None
    until = time.monotonic() + LOCK_S
    while not journals.lock_for_server(own):
        if time.monotonic() >= until:
            os.close(own)
            fact = f"another server still uses the kept arena after {LOCK_S:.0f} s"
            hint = "stop that server; `kvframework hold --status` names the process"
            raise ArenaError(fact, where="[l1] keep", hint=hint)
        time.sleep(_LOCK_STEP_S)
    return own


def _open(fd: int, arena: int, identity: Identity, tenants: Sequence[str]) -> tuple[Journal, journals.Found]:
    """Return the journal, which owns a copy of `fd`, and what it holds. Raises `Cold`."""
    with contextlib.ExitStack() as undo:
        try:
            journal = Journal(os.dup(fd))
            undo.callback(journal.close)
            _check_same(journals.read_identity(journal.memory), identity.of(arena))
            journal.start = journals.read_start(journal.memory)
            if journal.start.failed >= MAX_FAILED:
                raise Cold(
                    "failed_starts", f"{journal.start.failed} servers in a row ended within a second of their start"
                )
            # It counts as failed until it serves, also if what follows ends the process.
            try:
                journal.begin(tenants)
            except ValueError as error:
                raise Cold("other_configuration", f"the tenants do not fit into the journal: {error}") from None
            found = journals.read(journal.memory, os.fstat(arena).st_size)
        except (OSError, ValueError) as error:
            raise Cold("damaged", str(error)) from None
        journal.holds(found)
        undo.pop_all()
    return journal, found


def _check_same(kept: Identity, here: Identity) -> None:
    if kept.machine != here.machine:
        raise Cold("other_machine", "the machine was restarted")
    if kept.arena != here.arena:
        raise Cold("damaged", "the journal belongs to another arena")
    for field in Identity.__struct_fields__:
        was, now = getattr(kept, field), getattr(here, field)
        if was != now:
            raise Cold("other_configuration", f"{field} was {was}, is {now}")


def _drop(keeper: Keeper, name: str, fd: int) -> None:
    os.close(fd)
    try:
        keeper.remove(name)
    except OSError as error:
        log.warning("the keeper could not release %r: %s", name, error)
