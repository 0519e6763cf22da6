"""Requests and answers, and who may ask: the token of a request, and the host that it names. Pure but for the file of
the token."""

from __future__ import annotations

import base64
import binascii
import hmac
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import NamedTuple, TypeAlias

from kvf_observe.http.settings import is_loopback

PLAIN = "text/plain; charset=utf-8"
JSON = "application/json"
HEADERS = (
    (
        "content-security-policy",
        (
            "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
            "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        ),
    ),
    ("x-content-type-options", "nosniff"),
    ("referrer-policy", "no-referrer"),
    ("cache-control", "no-store"),
)
Answer: TypeAlias = "Reply | WantsBody | Awaitable[Reply]"
CHALLENGE = ("www-authenticate", 'Basic realm="kvframework", Bearer')


class Request(NamedTuple):
    """The head of a request. Names of headers are in lower case."""

    method: str
    target: str
    headers: Mapping[str, str] = {}


class Reply(NamedTuple):
    """An answer. The body of one to HEAD is not sent."""

    status: int
    type: str
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()


class WantsBody(NamedTuple):
    """What a request is answered with whose head is in order: it has a body of `most` bytes at most, for `answer`."""

    most: int
    answer: Callable[[bytearray], Reply | Awaitable[Reply]]


def refused(status: HTTPStatus, *headers: tuple[str, str]) -> Reply:
    """An answer that says its status and nothing else."""
    return Reply(status, PLAIN, f"{status.phrase}\n".encode(), headers)


class Rights:
    """`token` reads the token of now, "" for none; it raises `OSError`. With `loopback`, names of other hosts are
    refused: a page of another site that resolves to this machine is no reader."""

    def __init__(self, token: Callable[[], str], *, loopback: bool) -> None:
        self._token = token
        self._loopback = loopback

    def is_here(self, request: Request) -> bool:
        """Whether the request names a host that this listener answers for."""
        return not self._loopback or is_loopback(_host(request))

    def is_allowed(self, request: Request) -> bool:
        """Whether the request has the token; no request has one that cannot be read."""
        try:
            token = self._token()
        except OSError:
            return False
        return not token or hmac.compare_digest(_given(request).encode(), token.encode())


def _given(request: Request) -> str:
    """The token of a request: a bearer's, or the password of a browser."""
    scheme, _, value = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return value.strip()
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(value.strip(), validate=True).decode("utf-8", "replace").partition(":")[2]
        except (binascii.Error, ValueError):
            return ""
    return ""


def _host(request: Request) -> str:
    host = request.headers.get("host", "")
    name, colon, port = host.rpartition(":")
    return (name if colon and port.isdigit() else host).lower().strip("[]")
