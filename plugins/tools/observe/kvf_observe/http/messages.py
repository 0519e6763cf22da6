"""Requests and answers. Pure."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import NamedTuple, TypeAlias

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


Answer: TypeAlias = "Reply | WantsBody | Awaitable[Reply]"


def refused(status: HTTPStatus, *headers: tuple[str, str]) -> Reply:
    """An answer that says its status and nothing else."""
    return Reply(status, PLAIN, f"{status.phrase}\n".encode(), headers)
