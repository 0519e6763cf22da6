"""A listener's life in a process of its own: from its start to a signal."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import signal

from kvf_observe.http.listener import Listener
from kvf_observe.http.settings import Listening, is_loopback
from kvframework.config import parse_listen
from kvframework.errors import EndpointError

log = logging.getLogger(__name__)

# Of glibc's mallopt.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGE = 1 << 20


async def listen_until_signal(listener: Listener, config: Listening, where: str, what: str) -> None:
    """Answer until SIGINT or SIGTERM; the log says where, and that `what` is there. In the main thread. Raises
    `EndpointError`."""
    host, port = parse_listen(config.listen)
    _return_freed_memory()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    try:
        host, port = await listener.start(host, port)
    except OSError as error:
        raise EndpointError(f"cannot listen: {error.strerror or error}", where=where or config.listen) from None
    shown = f"[{host}]" if ":" in host else host
    log.info("%s: %s://%s:%d/", what, "https" if config.tls_cert else "http", shown, port)
    if not is_loopback(host) and not (config.token_file and config.tls_cert):
        log.warning(
            "other machines may reach %s:%d, without %s", shown, port, "TLS" if config.token_file else "a token"
        )
    await stop.wait()
    await listener.stop()


def _return_freed_memory() -> None:
    """Have glibc's malloc return what a body or an answer took: by itself it comes to keep blocks of up to 32 MiB."""
    with contextlib.suppress(AttributeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        if mallopt(_M_MMAP_THRESHOLD, _LARGE):
            mallopt(_M_TRIM_THRESHOLD, _LARGE)
