"""Who may ask: the token of a request, and the host that it names. Pure but for the file of the token."""

from __future__ import annotations

import base64
import binascii
import hmac
from collections.abc import Callable

from kvf_observe.http.messages import Request
from kvf_observe.http.settings import is_loopback

CHALLENGE = ("www-authenticate", 'Basic realm="kvframework", Bearer')


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
