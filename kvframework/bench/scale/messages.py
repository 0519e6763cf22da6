"""Owns what the bench's process and its client processes tell each other: one line of JSON each. Pure."""

from __future__ import annotations

from typing import Literal

import msgspec

Operation = Literal["echo", "lookup", "store", "retrieve"]
OPERATIONS: tuple[Operation, ...] = ("echo", "lookup", "store", "retrieve")


class Start(msgspec.Struct, frozen=True, tag="start"):
    """Where to connect to, and what tells this client from the others. A request is of `chunks` objects."""

    server: str
    echo: str
    instance_id: int
    seed: int
    chunks: int


class Fill(msgspec.Struct, frozen=True, tag="fill"):
    """Store the prompts from `first` on. What is there already may stay."""

    first: int
    count: int


class Clear(msgspec.Struct, frozen=True, tag="clear"):
    """Empty L1."""


class Run(msgspec.Struct, frozen=True, tag="run"):
    """From `at` (of the monotonic clock, which all processes share) for `seconds`, one request after the other.

    LOOKUP and RETRIEVE take any of the prompts `[first, first + count)`, stores take those from `first` on, each once.
    """

    operation: Operation
    first: int
    count: int
    at: float
    seconds: float


Order = Start | Fill | Clear | Run


class Report(msgspec.Struct, frozen=True):
    """The answer to every order. `latencies`, in seconds, are those of the requests of a `Run`, which took `took` from
    the first to the last. A `Start` is answered with the sizes of a LOOKUP and of an object. `error`: why an order was
    not carried out."""

    latencies: list[float] = []
    took: float = 0.0
    request_bytes: int = 0
    object_bytes: int = 0
    error: str = ""
