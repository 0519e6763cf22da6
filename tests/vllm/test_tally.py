"""What the connector counts, how it is merged and shown, and that its log lines stand in the engine's log."""

from __future__ import annotations

import logging

import pytest

from kvf_vllm.registration import join_log
from kvf_vllm.tally import COUNTERS, SECONDS, Tally, merged, summary


def test_counts_are_taken_once() -> None:
    tally = Tally()
    assert tally.take() == {}
    tally.count("stored_bytes", 5)
    tally.count("stored_bytes", 2)
    tally.missed("lora")
    tally.took("store", 0.5)
    assert tally.take() == {"stored_bytes": 7, "miss_requests|lora": 1, "seconds": {"store": [0.5]}}
    assert tally.take() == {}


def test_what_nobody_documented_cannot_be_counted() -> None:
    for name in ("stores", "seconds"):
        with pytest.raises(AssertionError):
            Tally().count(name)
    with pytest.raises(AssertionError):
        Tally().took("stores", 1.0)


def test_two_workers_are_one() -> None:
    one = {"loaded_bytes": 1, "seconds": {"load": [0.1], "store": [1.0]}}
    other = {"loaded_bytes": 2, "errors": 1, "seconds": {"load": [0.2]}}
    assert merged(one, other) == {"loaded_bytes": 3, "errors": 1, "seconds": {"load": [0.1, 0.2], "store": [1.0]}}
    assert one == {"loaded_bytes": 1, "seconds": {"load": [0.1], "store": [1.0]}}
    assert merged({}, {}) == {}


def test_the_log_line_is_short() -> None:
    data = {"loaded_bytes": 3 << 20, "hit_tokens": 4, "miss_requests|lora": 1, "seconds": {"load": [0.1, 0.3]}}
    assert summary(data) == {"loaded_MiB": 3.0, "hit_tokens": 4, "miss_requests.lora": 1, "load_ms_mean": 200.0}


def test_names_fit_prometheus() -> None:
    for name in (*COUNTERS, *SECONDS):
        assert name.replace("_", "").isalnum()
        assert not name.endswith("_total")


def test_the_engines_log_has_the_connectors_lines() -> None:
    engine, ours = logging.getLogger("test-engine"), logging.getLogger("kvf_vllm")
    root, before = logging.getLogger(), (ours.handlers, ours.level, ours.propagate)
    handlers, root.handlers = root.handlers, []
    engine.handlers = [logging.NullHandler()]
    engine.setLevel(logging.DEBUG)
    try:
        join_log("test-engine")
        assert (ours.handlers, ours.level, ours.propagate) == (engine.handlers, logging.DEBUG, False)
    finally:
        root.handlers = handlers
        for name in ("kvf_vllm", "kvframework", "kvf_cpu_gather"):
            logger = logging.getLogger(name)
            logger.handlers, logger.level, logger.propagate = before[0], before[1], before[2]


def test_an_application_that_logs_itself_is_left_alone() -> None:
    ours = logging.getLogger("kvf_vllm")
    logging.getLogger().addHandler(handler := logging.NullHandler())
    try:
        join_log("test-engine")
        assert not ours.handlers
        assert ours.propagate
    finally:
        logging.getLogger().removeHandler(handler)
