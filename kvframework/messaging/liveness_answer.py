"""Facts shared by both ends of a liveness socket: its one answer, and how to identify the user at the other end."""

from __future__ import annotations

import socket
import struct

# Sent with the arena's descriptor, or without one.
WITH_ARENA = b"\x01"
WITHOUT_ARENA = b"\x00"


def peer_uid(sock: socket.socket) -> int:
    """Return the user id of the process at the other end of a Unix socket."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    uid: int = struct.unpack("3i", credentials)[1]
    return uid
