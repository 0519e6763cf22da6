"""The copier process: its start, and its end with the server in every case.

Started by `kvframework.devices.supervisor`. The parent-death signal, the end of the socket, and the loss of its device
end it.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
import socket

from kvframework.api.driver import Arena
from kvframework.devices.copier import Copier
from kvframework.devices.messages import FRAME_HEAD, Failure, Frames, Lost, Start, framed, to_copier
from kvframework.errors import DeviceLost, KVFrameworkError
from kvframework.logs.form import LogForm, configure_logging, end_logging
from kvframework.parent_death import end_with_parent

log = logging.getLogger(__name__)

# The form for a server that sends none, such as one in a test.
_LOG = LogForm("warning", "human")


def main(arguments: list[str]) -> int:
    """Run the copier. `arguments` are the numbers of the socket's and of the arena's descriptor. Returns the exit
    status."""
    end_with_parent()
    # The lowest free number: `select` takes none above 1023.
    sock = socket.socket(fileno=os.dup(int(arguments[0])))
    os.close(int(arguments[0]))
    arena_fd = int(arguments[1])
    try:
        start = _first(sock)
    except EOFError:
        return 0
    configure_logging(*start.log or _LOG)
    try:
        return _work(sock, arena_fd, start)
    except (BrokenPipeError, ConnectionResetError):
        return 0
    except KVFrameworkError as error:
        lost = Lost(Failure.of(error))
    except Exception as error:
        log.exception("the copier of %s failed", start.device)
        lost = Lost(Failure(DeviceLost.code, f"{type(error).__name__}: {error}"))
    with contextlib.suppress(OSError):
        sock.sendall(framed(lost))
    # Not by the interpreter's exit: a lost device may hang in a library's exit handler.
    end_logging()
    os._exit(1)


def _first(sock: socket.socket) -> Start:
    """Read the first message, and not a byte more. Raises `EOFError`."""
    frames, wanted = Frames(), FRAME_HEAD
    while True:
        data = sock.recv(wanted, socket.MSG_WAITALL)
        if not data:
            raise EOFError
        for payload in frames.feed(data):
            start = to_copier(payload)
            assert isinstance(start, Start)
            return start
        wanted = frames.missing


def _work(sock: socket.socket, arena_fd: int, start: Start) -> int:
    create, options = start.create.resolve()
    segment = mmap.mmap(arena_fd, 0)
    os.close(arena_fd)
    view = memoryview(segment)
    address = ctypes.addressof(ctypes.c_char.from_buffer(segment))
    driver = create(options, start.device, Arena(view, address))
    Copier(sock, driver, options, len(view), start.slice_bytes).run()
    # The mappings end with the process, at once.
    end_logging()
    os._exit(0)
