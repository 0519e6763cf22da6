"""The problems in a status document: current ones, and the counters of failures. Pure. The document, the log,
`kvframework status` and docs/operations.md use the same names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kvframework.api.counter import Counter
from kvframework.api.plugin import ByteSize
from kvframework.status import trouble
from kvframework.text import counted, one_line
from kvframework.wire.messages import LOST_CALLS
from kvframework.wire.protocol import HINT

# Fewer calls of one client within a minute or so are noise.
LOST_MANY = 3
# A server that restarts costs the requests sent meanwhile, on which an operator need not act.
NO_SERVER = ("run.server_gone", "run.shutting_down")
EVERY_S = 10.0
# A call ends by its deadline, on a busy machine a little later. A call that is later than this may hang.
OVERDUE_S = 0.5
# A refused client tries again every 2 s.
REFUSED_LATELY_S = 10.0
# Refusals that leave a client without any cache.
SHUT_OUT = ("HELLO", "server")
# Doors of the server's gate, and the connections that each refuses.
SHUT = {"sessions": "new clients", "readers": "new event readers"}

Document = Mapping[str, Any]


def problems(document: Document) -> list[dict[str, str]]:
    """Return what keeps the server from working as configured now: `where` in the document, and the `fact`."""
    return [{"where": where, "fact": one_line(fact)} for where, fact in _problems(document)]


class CounterReport:
    """Reports, every `EVERY_S` seconds at most, which of these counters have grown."""

    def __init__(self, now: float) -> None:
        self._reported: dict[str, int] = {}
        self._next = now + EVERY_S

    def is_due(self, now: float) -> bool:
        return now >= self._next

    def changes(self, document: Document, now: float) -> str:
        """Return the counters that have grown since the last call on one line, and start the next interval."""
        self._next = now + EVERY_S
        before, found = self._reported, list(trouble(document))
        self._reported = {name: amount for name, _, amount in found}
        grown = ((name, counter, amount - before.get(name, 0)) for name, counter, amount in found)
        return "; ".join(_said(*each, document) for each in grown if each[2] > 0)


def _said(name: str, counter: Counter, amount: int, document: Document) -> str:
    part, _, rest = name.partition(".")
    said = counted(amount, counter.unit) + f" {counter.meaning}".rstrip()
    if amount == 1:
        said = said.replace(" were ", " was ")
    if part == "l2":
        tier = document["l2"][int(rest.partition(".")[0])]
        if name.endswith(".store_failed"):
            why = f": {one_line(tier['last_error'])}" if tier["last_error"] else ""
            return f"{said} in {tier['name']}{why} ({name})"
        said += f", in {tier['name']}"
    return f"{said} ({name})"


def _problems(document: Document) -> Iterator[tuple[str, str]]:
    l1 = document["l1"]
    if l1["ready_bytes"] < l1["capacity_bytes"]:
        yield "l1", f"{ByteSize(l1['ready_bytes'])} of {ByteSize(l1['capacity_bytes'])} of L1 are in memory so far"
    for number, tier in enumerate(document["l2"]):
        if tier["state"] != "closed":
            down = " and ".join(f"{name}s" for name, state in tier["circuits"].items() if state != "closed")
            fact = f"{tier['name']} is down for {down} for {tier['state_s']:.0f} s: {tier['last_error']}"
            yield f"l2.{number}", fact
        for fact in tier.get("problems", ()):
            yield f"l2.{number}", f"{tier['name']}: {fact}"
        if tier["overdue_s"] > OVERDUE_S:
            fact = f"a {tier['overdue_call']} to {tier['name']} still runs {tier['overdue_s']:.0f} s after its deadline"
            yield f"l2.{number}", fact
    log = document.get("log", {})
    if log.get("problem"):
        yield "log", f"the log {log['problem']}"
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
        in_use = f"{descriptors['in_use']} of {descriptors['limit']} open files are in use"
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
    calls = " and ".join(counted(recent[kind], kind) for kind in LOST_CALLS if recent[kind])
    codes = ", ".join(f"[{code}] {count}" for code, count in recent["codes"].items())
    who = f"{recent['client'][:128]!r} (process {recent['pid']})"
    advice = f"; {HINT}" if "run.deadline" in recent["codes"] else "; see its log"
    return f"{who} lost {calls} ({ByteSize(recent['bytes'])}), the last {recent['ago_s']:.0f} s ago: {codes}{advice}"
