"""The problems in a status document: current ones, and the counters of failures. Pure.

The document, the log, `kvframework status` and docs/operations.md use the same names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kvframework.api.options import ByteSize
from kvframework.text import counted, one_line
from kvframework.wire.protocol import HINT

L1_TROUBLE = ("dropped", "lapsed", "over_share", "quarantined")
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
    "local_shut",
    "malformed",
    "peers_shut_out",
    "server_refused",
    "tcp_shut",
    "tick_errors",
    "unanswerable",
)
LOSSES = ("lookups", "loads", "stores")
EVENTS_TROUBLE = ("curve_refused", "dropped", "mismatched")
# Fewer calls of one client within a minute or so are noise.
LOST_MANY = 3
# A server that restarts costs the requests sent meanwhile, on which an operator need not act.
NO_SERVER = ("run.server_gone", "run.shutting_down")
ERROR_COUNTER = "errors."  # followed by the code of an error that was answered
EVERY_S = 10.0
# A call ends by its deadline, on a busy machine a little later. A call that is later than this may hang.
OVERDUE_S = 0.5
# The meaning of each counter, as the log states it after the number.
MEANING = {
    "l1.counters.dropped": "objects had no room in L1",
    "l1.counters.lapsed": "pins outlived their lease",
    "l1.counters.over_share": "leases ended early or were refused by pin_share, as others needed room",
    "l1.counters.quarantined": "stores outlived their lease",
    "bugs": "calls of the tier met a bug of its plugin",
    "codec_failed": "values could not be unpacked",
    "corrupt": "values were damaged and are deleted",
    "errors": "calls of the tier failed",
    "foreign_codec": "values were packed by a codec that is not allowed",
    "read_failed": "values could not be read",
    "refused": "calls were not made, as the tier is down",
    "store_failed": "values could not be stored",
    "write_dropped": "objects were not written, as too many waited",
    "write_given_up": "objects could not be written and were given up",
    "write_lost": "objects left L1 before they were written",
    "losses.lookups": "lookups were lost by clients",
    "losses.loads": "loads were lost by clients",
    "losses.stores": "stores were lost by clients",
    "events.counters.curve_refused": "readers of events had an unknown key",
    "events.counters.dropped": "changes were not noted for routers in time, and are looked up",
    "events.counters.mismatched": "contents for routers were not what their digests name",
    "prefetch.refused": "loads did not begin, as too many were under way",
    "log.dropped": "lines of the log were lost",
    "messaging.counters.curve_refused": "connections had an unknown key",
    "messaging.counters.dropped": "answers were not received by their client",
    "messaging.counters.hello_refused": "clients were refused",
    "messaging.counters.late": "answers came after their deadline",
    "messaging.counters.liveness_refused": "liveness sockets were refused",
    "messaging.counters.loop_errors": "errors of the serving loop",
    "messaging.counters.malformed": "messages were malformed",
    "messaging.counters.server_refused": "clients refused this server",
    "messaging.counters.tick_errors": "errors of the server's periodic work",
    "messaging.counters.local_shut": "times new local connections were deferred, as descriptors ran low",
    "messaging.counters.peers_shut_out": "TCP peers held too many connections",
    "messaging.counters.tcp_shut": "times new TCP connections were deferred, as descriptors ran low",
    "messaging.counters.unanswerable": "messages had no request id",
}
# A refused client tries again every 2 s.
REFUSED_LATELY_S = 10.0
# Refusals that leave a client without any cache.
SHUT_OUT = ("HELLO", "server")
# Doors of the server's gate, and the newcomers that each refuses.
SHUT = {"tcp": "new TCP connections", "sessions": "new clients", "readers": "new readers of events"}

Document = Mapping[str, Any]


def problems(document: Document) -> list[dict[str, str]]:
    """Return the problems that keep the server from working as configured now: `where` in the document, and the
    `fact`."""
    return [{"where": where, "fact": one_line(fact)} for where, fact in _problems(document)]


def trouble(document: Document) -> dict[str, int]:
    """Return the counters of failures that are not 0, by their place in the document."""
    return {name: amount for name, amount in _counters(document) if amount}


class CounterReport:
    """Reports, every `EVERY_S` seconds at most, which of these counters have grown."""

    def __init__(self, now: float) -> None:
        self._reported: dict[str, int] = {}
        self._next = now + EVERY_S

    def is_due(self, now: float) -> bool:
        return now >= self._next

    def changes(self, document: Document, now: float) -> str:
        """Return the counters that have grown since the last call as one line, an empty one for none. Starts the next
        interval."""
        self._next = now + EVERY_S
        before, self._reported = self._reported, trouble(document)
        grown = {name: amount - before.get(name, 0) for name, amount in self._reported.items()}
        return "; ".join(_said(name, amount, document) for name, amount in grown.items() if amount > 0)


def _said(name: str, amount: int, document: Document) -> str:
    """Return the words for a counter that has grown, and its place in the document."""
    if name.startswith(f"messaging.counters.{ERROR_COUNTER}"):
        return f"{amount} requests were answered with an error ({name})"
    number, _, counter = name.removeprefix("l2.").partition(".")
    if name.startswith("l2."):
        tier = document["l2"][int(number)]
        if counter == "store_failed":
            why = f": {one_line(tier['last_error'])}" if tier["last_error"] else ""
            return f"{counted(amount, 'values')} could not be stored in {tier['name']}{why} ({name})"
        return f"{amount} {_meaning(counter)}, in {tier['name']} ({name})"
    return f"{amount} {_meaning(name)} ({name})"


def _meaning(name: str) -> str:
    return MEANING.get(name, f"{name} were counted")


def _problems(document: Document) -> Iterator[tuple[str, str]]:
    l1 = document["l1"]
    if l1["ready_bytes"] < l1["capacity_bytes"]:
        yield "l1", f"{ByteSize(l1['ready_bytes'])} of {ByteSize(l1['capacity_bytes'])} are resident"
    for number, tier in enumerate(document["l2"]):
        if tier["state"] != "closed":
            down = " and ".join(f"{name}s" for name, state in tier["circuits"].items() if state != "closed")
            fact = f"{tier['name']} is down for {down} since {tier['state_s']:.0f} s: {tier['last_error']}"
            yield f"l2.{number}", fact
        for fact in tier.get("problems", ()):
            yield f"l2.{number}", f"{tier['name']}: {fact}"
        if tier["overdue_s"] > OVERDUE_S:
            fact = f"a {tier['overdue_call']} to {tier['name']} still runs {tier['overdue_s']:.0f} s after its deadline"
            yield f"l2.{number}", fact
    log = document.get("log", {})
    if log.get("problem"):
        yield "log", f"it {log['problem']}"
    for part in ("observe", "events"):
        if document.get(part, {}).get("problem"):
            yield part, document[part]["problem"]
    for name, status in document.get("listeners", {}).items():
        if status.get("problem"):
            yield f"listeners.{name}", f"listener {name}: {status['problem']}"
    for context in document["instances"]:
        if context["lost"]:
            yield "instances", f"instance {context['instance_id']} must register again: {context['lost']}"
    descriptors = document["messaging"].get("descriptors", {})
    shut = [what for name, what in SHUT.items() if not descriptors.get(name, True)]
    if shut:
        in_use = f"{descriptors['in_use']} of {descriptors['limit']} descriptors are in use"
        yield "messaging.descriptors", f"{in_use}: {' and '.join(shut)} are not accepted"
    for refusal in document["messaging"].get("refused", ()):
        if refusal["what"] in SHUT_OUT and refusal["ago_s"] < REFUSED_LATELY_S:
            done = "refuses this server" if refusal["what"] == "server" else "is refused"
            who = f"{refusal['client'][:128]!r} (process {refusal['pid']})"
            yield "messaging.refused", f"{who} {done}: [{refusal['code']}] {refusal['reason']}"
    for recent in document.get("losses", {}).get("recent", ()):
        if sum(calls for code, calls in recent["codes"].items() if code not in NO_SERVER) >= LOST_MANY:
            yield "losses", _lost(recent)


def _lost(recent: Mapping[str, Any]) -> str:
    calls = " and ".join(counted(recent[kind], kind) for kind in LOSSES if recent[kind])
    codes = ", ".join(f"[{code}] {count}" for code, count in recent["codes"].items())
    who = f"{recent['client'][:128]!r} (process {recent['pid']})"
    advice = f"; {HINT}" if "run.deadline" in recent["codes"] else "; see its log"
    return (
        f"{who} lost {calls} ({ByteSize(recent['bytes'])}), the last one {recent['ago_s']:.0f} s ago: {codes}{advice}"
    )


def _counters(document: Document) -> Iterator[tuple[str, int]]:
    for name in L1_TROUBLE:
        yield f"l1.counters.{name}", document["l1"].get("counters", {}).get(name, 0)
    for number, tier in enumerate(document["l2"]):
        for name in L2_TROUBLE:
            yield f"l2.{number}.{name}", tier.get(name, 0)
    for name in LOSSES:
        yield f"losses.{name}", document.get("losses", {}).get(name, 0)
    yield "prefetch.refused", document.get("prefetch", {}).get("refused", 0)
    yield "log.dropped", document.get("log", {}).get("dropped", 0)
    for name in EVENTS_TROUBLE:
        yield f"events.counters.{name}", document.get("events", {}).get("counters", {}).get(name, 0)
    counters = document.get("messaging", {}).get("counters", {})
    for name in MESSAGING_TROUBLE:
        yield f"messaging.counters.{name}", counters.get(name, 0)
    for name in sorted(counters):
        if name.startswith(ERROR_COUNTER):
            yield f"messaging.counters.{name}", counters[name]
