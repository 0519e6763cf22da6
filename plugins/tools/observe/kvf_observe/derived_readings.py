"""Values of metrics that the status document does not hold as they are: what is left, what is closed. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime

from kvf_observe.http.exposition import Labels, Reader, Value
from kvf_observe.poller import Document
from kvf_observe.readings import found, tier_names
from kvframework import errors

# The codes with which a server of this release may answer.
CODES = tuple(
    sorted(
        error.code
        for error in vars(errors).values()
        if isinstance(error, type)
        and issubclass(error, errors.KVFrameworkError)
        and error.code.startswith(("protocol.", "request.", "run.", "storage."))
    )
)


def found_tokens(document: Document) -> Iterator[tuple[Labels, Value]]:
    """Tokens of lookups by model and by where they were found; the rest is missed."""
    for model, row in ({"other": {}} | (found(document, "lookups.by_model") or {})).items():
        asked, l1, l2 = (row.get(name, 0) for name in ("asked_tokens", "l1_tokens", "l2_tokens"))
        yield (model, "l1"), l1
        yield (model, "l2"), l2
        yield (model, "missed"), asked - l1 - l2


def l1_bytes(document: Document) -> Iterator[tuple[Labels, Value]]:
    """The resident bytes, each in one state."""
    used, free, quarantined = (found(document, f"l1.{name}_bytes") or 0 for name in ("used", "free", "quarantined"))
    yield from ((("used",), used - quarantined), (("free",), free), (("quarantined",), quarantined))


def capacities(document: Document) -> Iterator[tuple[Labels, Value]]:
    """The hit rates by capacity."""
    for point in found(document, "l1.more_capacity") or ():
        yield (str(point["capacity_bytes"]),), point["hit_rate"]


def tier_up(document: Document) -> Iterator[tuple[Labels, Value]]:
    """1 for a tier whose circuits are both closed."""
    for name, status in zip(tier_names(document), document.get("l2", ()), strict=True):
        yield (name,), int(status["state"] == "closed")


def tier_problems(document: Document) -> Iterator[tuple[Labels, Value]]:
    """1 for each problem that a tier reports, with its words, of which there are few; 0 for a tier without any."""
    for name, status in zip(tier_names(document), document.get("l2", ()), strict=True):
        facts = dict.fromkeys(status.get("problems", ()), 1) or {"": 0}
        yield from (((name, fact), value) for fact, value in facts.items())


def circuits(document: Document) -> Iterator[tuple[Labels, Value]]:
    """1 for a circuit that stops calls."""
    for name, status in zip(tier_names(document), document.get("l2", ()), strict=True):
        yield from (((name, which), int(state != "closed")) for which, state in status["circuits"].items())


def error_answers(document: Document) -> Iterator[tuple[Labels, Value]]:
    """Error answers by code: those of the core, and what plugins answered with."""
    counters = found(document, "messaging.counters") or {}
    answered = {name.removeprefix("errors."): n for name, n in counters.items() if name.startswith("errors.")}
    yield from (((code,), value) for code, value in (dict.fromkeys(CODES, 0) | answered).items())


def accepting(document: Document) -> Iterator[tuple[Labels, Value]]:
    """1 for each kind of newcomer that is accepted."""
    descriptors = found(document, "messaging.descriptors") or {}
    yield from (((what,), int(descriptors.get(what, True))) for what in ("local", "readers", "sessions", "tcp"))


def devices(field: str) -> Reader:
    """A field of each device; of `pid`, whether there is a process."""

    def read(document: Document) -> Iterator[tuple[Labels, Value]]:
        for name, status in (document.get("transports") or {}).items():
            for device in status.get("devices", ()) if isinstance(status, dict) else ():
                value = device.get(field)
                yield (name, str(device["device"])), int(value is not None) if field == "pid" else value

    return read


def started(document: Document) -> Iterator[tuple[Labels, Value]]:
    """The start of the server."""
    yield (), datetime.fromisoformat(document["server"]["started_at"]).timestamp()


def build(document: Document) -> Iterator[tuple[Labels, Value]]:
    """1, with the release."""
    yield (str(found(document, "server.version") or ""),), 1


def length(path: str) -> Reader:
    """How many items a list has."""
    return lambda document: iter([((), len(found(document, path) or ()))])
