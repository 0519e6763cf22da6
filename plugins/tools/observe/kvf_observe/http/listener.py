"""The HTTP server: bounded connections, each with deadlines for its request and for its answer.

h11 parses and writes HTTP/1.1; what is here is the I/O, and its bounds, which no server that was found has: see
docs/observe.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import logging
import signal
import socket
import ssl
from collections.abc import Callable
from http import HTTPStatus

import h11

from kvf_observe.http.messages import HEADERS, PLAIN, Answer, Listening, Reply, Request, WantsBody, is_loopback, refused
from kvframework.api.endpoint import parse_listen
from kvframework.api.process import one_line
from kvframework.errors import EndpointError

log = logging.getLogger(__name__)
MOST_CONNECTIONS = 128
HEAD_S = 10.0  # from a connection, or its last answer, to the whole head of a request
BODY_S = 10.0  # to a request's body
ANSWER_S = 20.0  # to take an answer
# Of all bodies that arrive or are being answered.
MOST_BODIES = 32 << 20
_RETRY_AFTER = ("retry-after", "1")
_MOST_HEAD = 16 << 10
_READ = 16 << 10
_EVENTS_AT_ONCE = 64  # a body may come in chunks of a byte
DISCARD_S = 1.0
PAUSE_S = 0.1
_MOST_DISCARDED = 1 << 20  # of a request without an admitted body
_LARGE = 1 << 20
# Of glibc's mallopt.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


class Listener:
    """Answers at one port. `answer` is asked with the head of a request, and its body is read only where that wants
    one: a stranger's never is. With `MOST_CONNECTIONS` open ones the oldest is closed for a new one, also if it has not
    ended its TLS handshake: asyncio's own servers do not bound these, and spin when descriptors run out."""

    def __init__(self, answer: Callable[[Request], Answer], *, tls: ssl.SSLContext | None = None) -> None:
        self._answer = answer
        self._tls = tls
        # The oldest first, by their last answer or the head of their request.
        self._open: dict[socket.socket, asyncio.Task[None]] = {}
        self._sockets: list[socket.socket] = []
        self._accepting: list[asyncio.Task[None]] = []
        self._body_bytes = 0

    async def start(self, host: str, port: int) -> tuple[str, int]:
        """Listen; return the address. Raises `OSError`."""
        self._sockets = _listening(host, port)
        self._accepting = [asyncio.create_task(self._accept(each)) for each in self._sockets]
        name = self._sockets[0].getsockname()
        return str(name[0]), int(name[1])

    async def stop(self) -> None:
        """Close the sockets and all connections, and wait for their tasks: a loop that cancels them logs each."""
        ending = [*self._accepting, *self._open.values()]
        for task in ending:
            task.cancel()
        if ending:
            await asyncio.wait(ending, timeout=DISCARD_S)
        for each in self._sockets:
            each.close()

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listening)
            except OSError as error:
                log.warning("the HTTP listener cannot accept a connection: %s", error.strerror or error)
                await asyncio.sleep(PAUSE_S)
                continue
            if len(self._open) >= MOST_CONNECTIONS:
                oldest = next(iter(self._open))
                del self._open[oldest]
                # Its task meets the end of the stream.
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)
            self._open[connection] = asyncio.create_task(self._serve(connection))
            await asyncio.sleep(0)

    async def _serve(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(_MOST_HEAD, loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
        try:
            transport, _ = await loop.connect_accepted_socket(
                lambda: protocol, connection, ssl=self._tls, ssl_handshake_timeout=HEAD_S if self._tls else None
            )
            writer = asyncio.StreamWriter(transport, protocol, reader, loop)
            # `drain` then waits until everything is sent.
            transport.set_write_buffer_limits(0)
            try:
                await self._talk(connection, reader, writer)
            finally:
                transport.abort()
        except (OSError, asyncio.TimeoutError, asyncio.IncompleteReadError) as error:
            # The frames are in a circle with it, and hold buffers of TLS, 256 KiB, until that is collected.
            error.__traceback__ = None
        except Exception:
            log.exception("serving an HTTP connection failed")
        finally:
            self._open.pop(connection, None)
            connection.close()

    async def _talk(self, place: socket.socket, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = h11.Connection(h11.SERVER, max_incomplete_event_size=_MOST_HEAD)
        while True:
            try:
                request = await asyncio.wait_for(_next(connection, reader), HEAD_S)
                if request is None:
                    return
                reply, unread = await self._answered(place, request, connection, reader, writer)
            except h11.RemoteProtocolError as error:
                status = HTTPStatus(error.error_status_hint)
                await self._send(connection, writer, Reply(status, PLAIN, f"{status.phrase}\n".encode()), last=True)
                await _discard(reader)
                return
            await self._send(connection, writer, reply, last=unread > 0, head_only=request.method == b"HEAD")
            if connection.our_state is not h11.DONE:
                await _discard(reader, unread)
                return
            while connection.their_state is h11.SEND_BODY:
                connection.next_event()
            connection.start_next_cycle()
            self._renew(place)
            await asyncio.sleep(0)  # requests that have arrived together take turns with others

    def _renew(self, place: socket.socket) -> None:
        if place in self._open:
            self._open[place] = self._open.pop(place)

    async def _answered(
        self,
        place: socket.socket,
        request: h11.Request,
        connection: h11.Connection,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> tuple[Reply, int]:
        """The answer to a request, and how many bytes of it are worth reading so that its sender sees the answer."""
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in request.headers}
        method, target = request.method.decode("latin-1"), request.target.decode("latin-1")
        answer = await self._reply(target, lambda: self._answer(Request(method, target, headers)))
        if isinstance(answer, Reply):
            if not _has_body(request):
                return answer, 0
            return answer if answer.status >= HTTPStatus.BAD_REQUEST else _too_large("no body"), _MOST_DISCARDED
        self._renew(place)
        body = bytearray()
        try:
            refusal = await asyncio.wait_for(
                self._receive(body, answer.most, request, connection, reader, writer), BODY_S
            )
            if refusal is not None:
                return refusal, answer.most
            wanted = answer.answer
            reply = await self._reply(target, lambda: wanted(body))
            assert isinstance(reply, Reply), "an HTTP handler asked for the request's body again"
            return reply, 0
        finally:
            self._body_bytes -= len(body)
            # A late body's error refers to its frames, and these to it, until that circle is collected.
            with contextlib.suppress(BufferError):
                body.clear()

    async def _receive(
        self,
        body: bytearray,
        most: int,
        request: h11.Request,
        connection: h11.Connection,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> Reply | None:
        """Add all of a request's body to an empty one; the answer instead for one that is too large, or too much beside
        the others."""
        if not _has_body(request):
            return None
        announced = int(next((value for name, value in request.headers if name == b"content-length"), b"0"))
        if (refusal := self._refusal(announced, announced, most)) is not None:
            return refusal
        if connection.they_are_waiting_for_100_continue:
            writer.write(connection.send(h11.InformationalResponse(status_code=HTTPStatus.CONTINUE, headers=[])) or b"")
        events = 0
        while True:
            event = connection.next_event()
            if event is h11.NEED_DATA:
                connection.receive_data(await reader.read(_READ))
            elif isinstance(event, h11.Data):
                if (refusal := self._refusal(len(body) + len(event.data), len(event.data), most)) is not None:
                    # At once, or all that arrive now would be refused for each other.
                    self._body_bytes -= len(body)
                    body.clear()
                    return refusal
                body += event.data
                self._body_bytes += len(event.data)
                events += 1
                if events % _EVENTS_AT_ONCE == 0:
                    await asyncio.sleep(0)
            elif isinstance(event, h11.EndOfMessage):
                return None
            else:
                raise asyncio.IncompleteReadError(b"", None)

    def _refusal(self, length: int, more: int, most: int) -> Reply | None:
        """The answer to a body of that length, of which so many bytes are not counted yet; None if it may come."""
        if length > most:
            return _too_large("the body of the request is too large")
        if self._body_bytes + more > MOST_BODIES:
            return refused(HTTPStatus.SERVICE_UNAVAILABLE, _RETRY_AFTER)
        return None

    async def _reply(self, target: str, answer: Callable[[], Answer]) -> Reply | WantsBody:
        try:
            reply = answer()
            return reply if isinstance(reply, (Reply, WantsBody)) else await reply
        except Exception:
            log.exception("answering the HTTP request %s failed", one_line(target[:200]))
            return Reply(HTTPStatus.INTERNAL_SERVER_ERROR, PLAIN, b"the request failed; see the log\n")

    async def _send(
        self,
        connection: h11.Connection,
        writer: asyncio.StreamWriter,
        reply: Reply,
        *,
        last: bool = False,
        head_only: bool = False,
    ) -> None:
        if connection.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            return
        status = HTTPStatus(reply.status)
        headers = [("content-type", reply.type), ("content-length", str(len(reply.body))), *HEADERS, *reply.headers]
        if last:
            headers.append(("connection", "close"))
        head = h11.Response(status_code=status.value, reason=status.phrase.encode(), headers=headers)
        data = connection.send(head) or b""
        if not head_only:
            data += connection.send(h11.Data(data=reply.body)) or b""
        data += connection.send(h11.EndOfMessage()) or b""
        writer.write(data)
        await asyncio.wait_for(writer.drain(), ANSWER_S)


def _listening(host: str, port: int) -> list[socket.socket]:
    """Sockets that listen at all addresses of `host`, but for families that this machine lacks. Raises `OSError`."""
    sockets: list[socket.socket] = []
    lacking = OSError(errno.EADDRNOTAVAIL, "the address does not exist")
    try:
        for family, _, _, _, place in socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        ):
            try:
                made = socket.create_server(place, family=family, backlog=MOST_CONNECTIONS)
            except OSError as error:
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise
                lacking = error
                continue
            made.setblocking(False)
            sockets.append(made)
    except OSError:
        for each in sockets:
            each.close()
        raise
    if not sockets:
        raise lacking
    return sockets


async def _next(connection: h11.Connection, reader: asyncio.StreamReader) -> h11.Request | None:
    """The next request's head; None at the end of the connection."""
    while True:
        event = connection.next_event()
        if isinstance(event, h11.Request):
            return event
        if event is h11.NEED_DATA:
            connection.receive_data(await reader.read(_READ))
        elif event is h11.PAUSED or isinstance(event, h11.ConnectionClosed):
            return None


async def _discard(reader: asyncio.StreamReader, most: int = _MOST_DISCARDED) -> None:
    """Read on for a moment: the end of a connection with unread data would take the answer with it."""

    async def read() -> None:
        left = most
        while left > 0 and (data := await reader.read(_READ)):
            left -= len(data)

    await asyncio.wait_for(read(), DISCARD_S if most <= _MOST_DISCARDED else BODY_S)


def _too_large(why: str) -> Reply:
    return Reply(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, PLAIN, f"{why}\n".encode())


def _has_body(request: h11.Request) -> bool:
    return any(
        name == b"transfer-encoding" or (name == b"content-length" and value != b"0") for name, value in request.headers
    )


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
        raise EndpointError(
            f"the HTTP listener cannot use the address: {error.strerror or error}", where=where or config.listen
        ) from None
    shown = f"[{host}]" if ":" in host else host
    log.info("%s: %s://%s:%d/", what, "https" if config.tls_cert else "http", shown, port)
    if not is_loopback(host) and not (config.token_file and config.tls_cert):
        log.warning("other machines can reach %s:%d without %s", shown, port, "TLS" if config.token_file else "a token")
    await stop.wait()
    await listener.stop()


def _return_freed_memory() -> None:
    """Have glibc's malloc return what a body or an answer took: by itself it comes to keep blocks of up to 32 MiB."""
    with contextlib.suppress(AttributeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        if mallopt(_M_MMAP_THRESHOLD, _LARGE):
            mallopt(_M_TRIM_THRESHOLD, _LARGE)
