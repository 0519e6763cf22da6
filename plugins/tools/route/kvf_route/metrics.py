"""The table of the router's metrics, read from `Router.document`. Labels are endpoints, which the router's own
configuration names; never a salt, a token or a text of a publisher."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from kvf_observe.http.exposition import Document, Labels, Metric, Reader, Type, family

_NODE = ("publisher",)


def exposition(document: Document, *, open_metrics: bool) -> bytes:
    """The text of /metrics."""
    lines = [line for metric in METRICS for line in family(metric, document, open_metrics=open_metrics)]
    return ("\n".join([*lines, *(["# EOF"] if open_metrics else [])]) + "\n").encode("utf-8", "replace")


def _each(read: Callable[[Any], Any]) -> Reader:
    """A number for each publisher."""

    def rows(document: Document) -> Iterator[tuple[Labels, Any]]:
        for publisher in document["publishers"]:
            yield (_name(publisher),), read(publisher)

    return rows


def _by(field: str) -> Reader:
    """The numbers of a map for each publisher."""

    def rows(document: Document) -> Iterator[tuple[Labels, Any]]:
        for publisher in document["publishers"]:
            for name, number in publisher[field].items():
                yield (_name(publisher), name), number

    return rows


def _name(publisher: Document) -> str:
    """The endpoint; with the topic where only that counts."""
    return " ".join(filter(None, (publisher["events"], publisher["topic"])))


def _whole(field: str) -> Reader:
    return lambda document: iter([((), document[field])])


def _metric(name: str, kind: Type, help_: str, read: Reader, labels: Labels = _NODE) -> Metric:
    return Metric(f"route_{name}", kind, help_, "", read, labels)


METRICS = (
    _metric("connected", "gauge", "whether it is connected", _each(lambda each: each["connected"])),
    _metric("in_step", "gauge", "whether all that it announced is in the index", _each(lambda each: each["in_step"])),
    _metric("blocks", "gauge", "blocks that it holds", _each(lambda each: each["blocks"])),
    _metric("batches_total", "counter", "batches taken in", _each(lambda each: each["batches"])),
    _metric("lost_batches_total", "counter", "batches that no replay gave", _each(lambda each: each["lost_batches"])),
    _metric("forgotten_total", "counter", "times that all was forgotten", _each(lambda each: each["forgotten"])),
    _metric(
        "failed_replays_total", "counter", "replays that were not answered", _each(lambda each: each["failed_replays"])
    ),
    _metric("odd_events_total", "counter", "events that name no block", _by("events_by_kind"), ("publisher", "kind")),
    _metric(
        "announced_blocks_total", "counter", "blocks announced, by fate", _by("blocks_by_fate"), ("publisher", "fate")
    ),
    _metric("index_blocks", "gauge", "blocks in the index, once for each place", _whole("blocks"), ()),
    _metric("index_most_blocks", "gauge", "blocks for which it has room", _whole("most_blocks"), ()),
    _metric("index_bytes", "gauge", "memory of a full index", _whole("index_bytes"), ()),
    _metric("requests_total", "counter", "scores asked for", _whole("requests"), ()),
    _metric("refused_requests_total", "counter", "requests that were none", _whole("refused_requests"), ()),
    _metric("score_seconds", "histogram", "time to compute a score", _whole("score_s"), ()),
)
