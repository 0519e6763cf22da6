"""What `observe` sees in each row of the failure tables of docs/operations.md: polls of documents, row by row."""

from __future__ import annotations

from typing import Any

from kvf_observe.poller import Observed
from tests.observe.documents import answered, document, unanswered

SILENT = unanswered("[run.deadline] no answer to NOOP within 5.0 s")
AWAY = unanswered("[run.server_gone] no server answers at ipc:///run/kvframework/server.sock")
REFUSED = {"client": "new", "pid": 7, "client_version": "", "versions": [], "count": 3, "ago_s": 1.0}
HELLO = {**REFUSED, "what": "HELLO", "code": "protocol.version", "reason": "no common version"}
THEIRS = {**REFUSED, "what": "server", "code": "protocol.version", "reason": "another chunk size"}
LOST = {
    "session_id": 3,
    "client": "engine",
    "pid": 7,
    "lookups": 5,
    "loads": 0,
    "stores": 0,
    "bytes": 0,
    "codes": {"run.deadline": 5},
    "ago_s": 2.0,
}


def _doc(**places: Any) -> tuple[Observed, ...]:
    return (answered(document(**places)),)


def _down(direction: str, error: str) -> tuple[Observed, ...]:
    places = {"l2__1__state": "open", f"l2__1__circuits__{direction}": "open", "l2__1__last_error": error}
    return _doc(**places)


# By the anchor of the row.
ROWS: dict[str, tuple[Observed, ...]] = {
    "malformed": _doc(messaging__counters__malformed=9, messaging__refused=[{**HELLO, "what": "LOOKUP"}]),
    "client-refused": _doc(messaging__refused=[HELLO]),
    "server-refused": _doc(messaging__refused=[THEIRS]),
    "engine-died": _doc(messaging__counters__sessions_ended=1, instances=[]),
    "writer-stopped": _doc(l1__quarantined_bytes=4096, l1__counters__quarantined=1),
    "reader-slow": _doc(l1__counters__lapsed=3),
    "handler-raised": (answered(document(messaging__counters={"errors.run.handler": 1})),),
    "two-namespaces": _doc(namespaces=["0" * 32, "1" * 32]),
    "namespace-unknown": _doc(lookups__unknown_namespace=8),
    "server-silent": (SILENT, *_doc(losses__recent=[LOST])),
    "server-killed": (AWAY,),
    "server-absent": (AWAY,),
    "share-pinned": _doc(l1__counters__over_share=3),
    "l1-full-of-pins": _doc(l1__counters__dropped=5),
    "l1-full": _doc(l1__evictions=500),
    "arena-does-not-fit": (AWAY,),
    "arena-not-resident": _doc(l1__ready_bytes=4096),
    "server-oom": (AWAY,),
    "descriptors-low": _doc(messaging__descriptors__tcp=False, messaging__descriptors__sessions=False),
    "engine-descriptors": _doc(instances=[]),
    "arena-not-pinned": _doc(instances__0__lost="the arena cannot be pinned"),
    "arena-not-placed": _doc(),
    "tier-down": _down("read", "cannot connect to 127.0.0.1:6379"),
    "tier-login": _down("read", "the server refuses the user name or password"),
    "tier-full": _doc(
        l2__1__store_failed=9, l2__1__write_given_up=3, l2__1__problems=["/mnt/kv: No space left on device"]
    ),
    "tier-evicts": _doc(l2__1__misses=900),
    "tier-read-only": _down("write", "Read-only file system"),
    "tier-slow": _doc(l2__1__overdue_s=31.0, l2__1__overdue_call="put", l2__1__write_dropped=7),
    "tier-bug": (*_down("read", "get_into raised RuntimeError: boom"),),
    "tier-values-unusable": _doc(l2__1__corrupt=2),
    "peers-apart": _doc(l2__1__problems=["10.0.0.8:9310: the node did not answer in time"]),
    "codec-not-allowed": _doc(l2__1__foreign_codec=2),
    "loads-refused": _doc(prefetch__refused=4),
    "copier-ended": _doc(instances__0__lost="the copier of 0000:01:00.0 ended by signal SIGKILL"),
    "instance-does-not-fit": _doc(losses__recent=[{**LOST, "codes": {"request.not_registered": 5}}]),
    "wrong-key": _doc(messaging__counters__curve_refused=3),
    "keys-unreadable": _doc(messaging__counters__curve_refused=3),
    "other-user": _doc(messaging__counters__liveness_refused=3),
    "client-silent": _doc(messaging__counters__sessions_ended=1),
    "log-not-written": _doc(log__problem="cannot be written: No space left on device", log__dropped=9),
    "observe-ended": _doc(observe__problem="`kvframework observe` ended by signal SIGKILL"),
    "events-silent": _doc(events__problem="the server sends no events to routers: ValueError()"),
    "events-dropped": _doc(events__counters__dropped=3),
    "events-mismatched": _doc(events__counters__mismatched=3),
    "clock-jumps": _doc(),
}
