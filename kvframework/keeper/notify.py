"""A server's side of its keeper: systemd's descriptor store, or `kvframework hold`, which speaks the same words."""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import socket
import struct
from collections.abc import Collection, MutableMapping

from kvframework.keeper.notes import (
    FIRST_FD,
    LISTEN_VARIABLES,
    NOTIFY_VARIABLE,
    READY,
    STOPPING,
    listened_names,
    remove_note,
    store_note,
)

SEND_S = 1


class Keeper:
    """The keeper of this process. Each send blocks for `SEND_S` seconds at most, and raises `OSError` when the keeper
    has ended (`ConnectionRefusedError`, `FileNotFoundError`) or does not read (`BlockingIOError`); a sent message has
    no answer. Thread-safe."""

    lasts = True

    def __init__(self, address: str, found: list[tuple[str, int]]) -> None:
        """`found` are the descriptors from the keeper by name, owned from here on."""
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        self._found = found
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        # The kernel holds as few as 10 messages for a keeper, of all its services.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", SEND_S, 0))

    @classmethod
    def from_environment(cls, environ: MutableMapping[str, str] = os.environ) -> Keeper | None:
        """Return the keeper that started this process, None without one. Once, early in the process and before it
        starts others: it takes the keeper's variables out of `environ`, and no child inherits the descriptors.
        Descriptors without a keeper are closed. Raises `OSError` when there are no descriptors left."""
        variables = {name: environ.pop(name) for name in LISTEN_VARIABLES if name in environ}
        address = environ.pop(NOTIFY_VARIABLE, "")
        found = []
        for fd, name in enumerate(listened_names(variables, os.getpid()), FIRST_FD):
            with contextlib.suppress(OSError):  # no such descriptor
                fcntl.fcntl(fd, fcntl.F_SETFD, fcntl.FD_CLOEXEC)
                found.append((name, fd))
        if address[:1] in ("/", "@") and address[1:]:
            return cls(address, found)
        for _, fd in found:
            os.close(fd)
        return None

    def has(self, name: str) -> bool:
        """Whether `kept` has yet to return a descriptor of this name."""
        return any(name == each for each, _ in self._found)

    def kept(self, names: Collection[str]) -> dict[str, int]:
        """Return what the keeper has had of `names`; the caller owns the descriptors. Any other, and all of a name that
        came more than once, are closed, and the keeper is asked to remove them. Once: empty from the second time on."""
        found, self._found = self._found, []
        counts: dict[str, int] = {}
        for name, _ in found:
            counts[name] = counts.get(name, 0) + 1
        kept = {}
        for name, fd in found:
            if name in names and counts[name] == 1:
                kept[name] = fd
            else:
                os.close(fd)
        for name in counts.keys() - kept.keys() - {""}:
            with contextlib.suppress(OSError):  # the next start finds it again
                self.remove(name)
        return kept

    def store(self, name: str, fd: int) -> None:
        """Have the keeper keep a duplicate of `fd`, which stays the caller's. `kvframework hold` replaces what it has
        under the name, systemd keeps both: remove the name first. Raises `OSError`, and `ValueError` for a name that is
        not printable ASCII without a colon."""
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))
        self._socket.sendmsg([store_note(name)], [rights], 0, self._address)

    def remove(self, name: str) -> None:
        """Have the keeper close what it has under the name. The keeper's share of the memory is free some time later:
        to have it free at once, free the pages of the file. Raises as `store` does."""
        self._send(remove_note(name))

    def ready(self) -> None:
        """Tell the keeper that this process serves. Raises `OSError`."""
        self._send(READY)

    def stopping(self) -> None:
        """Tell the keeper that this process ends in order. Raises `OSError`."""
        self._send(STOPPING)

    def close(self) -> None:
        """Close the socket, and what `kept` has not returned. Idempotent."""
        found, self._found = self._found, []
        for _, fd in found:
            os.close(fd)
        self._socket.close()

    def _send(self, note: bytes) -> None:
        self._socket.sendto(note, self._address)
