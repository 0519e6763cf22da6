"""Points of a poll a second, with bounds, through restarts and silence."""

from __future__ import annotations

import json
from typing import Any
from unittest import mock

from kvf_observe.poller import FIELDS, MINUTES, SECONDS, History, Poller
from tests.observe.documents import answered, document, unanswered
from tests.support.waiting import wait_until


def points(history: History, what: str = "seconds", after: float = 0.0) -> list[dict[str, Any]]:
    made = json.loads(history.document(after))
    assert made["fields"] == list(FIELDS)
    return [dict(zip(FIELDS, point, strict=True)) for point in made[what]]


def test_a_point_has_the_sums() -> None:
    history = History()
    row = {"asked_tokens": 100, "l1_tokens": 60, "l2_tokens": 30}
    histogram = {"first": 1e-4, "counts": [1, 2], "sum": 0.5}
    status = document(lookups__by_model={"m": row}, l2__1__seconds={"get_into": histogram}, l1__evictions=4)
    history.add(answered(status, time=10.0))
    (point,) = points(history)
    assert (point["asked_tokens"], point["l1_tokens"], point["l2_tokens"], point["evicted_objects"]) == (100, 60, 30, 4)
    assert point["tiers"][1][:4] == ["redis", 1, 3, 0.5]
    assert point["problems"] == 0


def test_silence_leaves_a_gap_and_a_restart_counts() -> None:
    history = History()
    history.add(answered(time=10.0))
    history.add(unanswered())
    history.add(answered(document(server__boot_id="1" * 32), time=13.0))
    assert [(point["time"], point["boot"]) for point in points(history)] == [(10.0, 1), (13.0, 2)]
    assert [point["time"] for point in points(history, after=10.0)] == [13.0]


def test_a_longer_time_takes_no_more_than_a_day() -> None:
    history = History()
    status = document()
    for minute in range(MINUTES + 60):
        history.add(answered(status, time=minute * 60.0))
    history.add(answered(status, time=minute * 60.0 + 59))
    minutes = points(history, "minutes")
    assert (len(points(history)), len(minutes)) == (SECONDS, MINUTES)
    assert minutes[-1]["time"] == minute * 60.0 + 59  # the last one of its minute
    assert minutes[-2]["time"] == (minute - 1) * 60.0


def test_a_document_that_makes_no_point_does_not_end_the_polls() -> None:
    history, source = History(), mock.Mock(ask=lambda: b'{"l2": [{"name": "of another release"}]}', round_trip_s=0.1)
    poller = Poller(source, history.add, every_s=0.01)
    poller.start()
    wait_until(lambda: poller.latest.polls > 2, what="polls")
    poller.stop()
    assert points(history) == []
