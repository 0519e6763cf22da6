"""What a tier raises that is no error of the framework is told as a bug of the plugin, with its traceback once."""

from __future__ import annotations

import logging

import pytest

from kvframework.errors import ConfigFieldError, TierError
from kvframework.storage.l2.sealed_tier import L2Store
from tests.core.storage.memory import packed_key
from tests.core.storage.tier import MemoryTier

KEYS = [packed_key(1)]


@pytest.fixture
def tier() -> MemoryTier:
    return MemoryTier()


@pytest.fixture
def store(tier: MemoryTier) -> L2Store:
    return L2Store(tier, timeout_s=5.0)


def ask(store: L2Store, times: int = 1) -> None:
    for _ in range(times):
        with pytest.raises(TierError):
            store.contains(KEYS)


def test_a_bug_is_told_with_class_call_and_traceback_once(
    tier: MemoryTier, store: L2Store, caplog: pytest.LogCaptureFixture
) -> None:
    tier.raises = RuntimeError("boom")
    ask(store, 2)
    told = [record for record in caplog.records if record.exc_info]
    assert [record.getMessage() for record in told] == [
        "tier memory: contains raised RuntimeError: boom, which is a bug in the plugin"
    ]
    assert told[0].levelno == logging.ERROR
    assert "_answer" in caplog.text, "the traceback shows the plugin's lines"
    assert (store.counters["bugs"], store.counters["errors"]) == (2, 2)
    assert "RuntimeError: boom, which is a bug in the plugin" in str(store.status()["last_error"])
    tier.raises = KeyError("other")
    ask(store)
    assert len([record for record in caplog.records if record.exc_info]) == 2


@pytest.mark.parametrize("error", [TierError("the store is gone", where="memory"), ConfigFieldError("bad", where="x")])
def test_an_error_of_the_framework_is_no_bug(
    error: Exception, tier: MemoryTier, store: L2Store, caplog: pytest.LogCaptureFixture
) -> None:
    tier.raises = error
    ask(store)
    assert (store.counters["bugs"], store.counters["errors"]) == (0, 1)
    assert not [record for record in caplog.records if record.exc_info]
    assert "bug" not in caplog.text
