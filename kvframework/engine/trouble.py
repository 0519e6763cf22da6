"""Owns what of a status document is trouble: what is wrong now, and which counters count what went wrong. Pure.

The same names stand in the document, in the log, in what `kvframework status` shows and in docs/operations.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kvframework.api import ByteSize
from kvframework.one_line import one_line

L1_TROUBLE = ("dropped", "lapsed", "quarantined")
L2_TROUBLE = (
    "bugs",
    "codec_failed",
    "corrupt",
    "errors",
    "foreign_codec",
    "read_failed",
    "refused",
    "store_failed",
    "write_dropped",
    "write_given_up",
    "write_lost",
)
MESSAGING_TROUBLE = (
    "curve_refused",
    "dropped",
    "hello_refused",
    "late",
    "liveness_refused",
    "loop_errors",
    "malformed",
    "server_refused",
    "tick_errors",
    "unanswerable",
    "unroutable",
)
ERROR_COUNTER = "errors."  # then the code of an error that was answered
EVERY_S = 10.0
# A client that is refused tries again every 2 s.
REFUSED_LATELY_S = 10.0
# Of what may be refused: then a client has no cache at all.
SHUT_OUT = ("HELLO", "server")

Document = Mapping[str, Any]


def problems(document: Document) -> list[dict[str, str]]:
    """What keeps the server from working as configured now: `where` in the document, and the `fact`."""
    return [{"where": where, "fact": one_line(fact)} for where, fact in _problems(document)]


def trouble(document: Document) -> dict[str, int]:
    """The counters of what went wrong that are not 0, by their place in the document."""
    return {name: amount for name, amount in _counters(document) if amount}


class Account:
    """Tells, every `EVERY_S` seconds at most, which of these counters have grown."""

    def __init__(self, now: float) -> None:
        self._told: dict[str, int] = {}
        self._next = now + EVERY_S

    def due(self, now: float) -> bool:
        return now >= self._next

    def line(self, document: Document, now: float) -> str:
        """ "" if none has grown. Begins the next time span."""
        self._next = now + EVERY_S
        before, self._told = self._told, trouble(document)
        grown = {name: amount - before.get(name, 0) for name, amount in self._told.items()}
        return ", ".join(f"{name} +{amount}" for name, amount in grown.items() if amount > 0)


def _problems(document: Document) -> Iterator[tuple[str, str]]:
    l1 = document["l1"]
    if l1["ready_bytes"] < l1["capacity_bytes"]:
        yield "l1", f"{ByteSize(l1['ready_bytes'])} of {ByteSize(l1['capacity_bytes'])} are resident"
    for number, tier in enumerate(document["l2"]):
        if tier["state"] != "closed":
            down = " and ".join(f"{name}s" for name, state in tier["circuits"].items() if state != "closed")
            fact = f"{tier['name']} is down for {down} since {tier['state_s']:.0f} s: {tier['last_error']}"
            yield f"l2.{number}", fact
    for context in document["instances"]:
        if context["lost"]:
            yield "instances", f"instance {context['instance_id']} has to register again: {context['lost']}"
    for refusal in document["messaging"].get("refused", ()):
        if refusal["what"] in SHUT_OUT and refusal["ago_s"] < REFUSED_LATELY_S:
            done = "refuses this server" if refusal["what"] == "server" else "is refused"
            who = f"{refusal['client'][:128]!r} (process {refusal['pid']})"
            yield "messaging.refused", f"{who} {done}: [{refusal['code']}] {refusal['reason']}"


def _counters(document: Document) -> Iterator[tuple[str, int]]:
    for name in L1_TROUBLE:
        yield f"l1.counters.{name}", document["l1"].get("counters", {}).get(name, 0)
    for number, tier in enumerate(document["l2"]):
        for name in L2_TROUBLE:
            yield f"l2.{number}.{name}", tier.get(name, 0)
    yield "prefetch.refused", document.get("prefetch", {}).get("refused", 0)
    counters = document.get("messaging", {}).get("counters", {})
    for name in MESSAGING_TROUBLE:
        yield f"messaging.counters.{name}", counters.get(name, 0)
    for name in sorted(counters):
        if name.startswith(ERROR_COUNTER):
            yield f"messaging.counters.{name}", counters[name]
