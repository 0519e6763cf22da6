"""A tier in a helper process keeps the contract of tiers, and what freezes or ends there costs `TierError`s."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from kvframework.api.helper import FROZEN_S, HelperTier

from kvframework.api.tier import Outcome, Tier, TierError
from kvframework.testing import TierConformance
from tests.api.helper_tiers import Wrong, filesystem, unmakeable
from tests.support.processes import send
from tests.support.waiting import wait_until


def soon() -> float:
    return time.monotonic() + 60.0


def key(deed: str) -> bytes:
    return deed.encode() * 72


class Kept:
    """A helper that one test after the other uses: its start is the most of what a test costs."""

    def __init__(self, folder: Path) -> None:
        self.made = partial(filesystem, str(folder))
        self.tier = self.start()

    def start(self) -> HelperTier:
        return HelperTier(self.made, name="filesystem", where="[[l2]] #1", capabilities=("scan", "touch", "usage"))

    def empty(self) -> HelperTier:
        try:
            keys = [entry.key for entry in self.tier.scan(deadline=soon())]
        except TierError:  # the test before has closed it
            self.tier = self.start()
            keys = [entry.key for entry in self.tier.scan(deadline=soon())]
        self.tier.delete(keys, deadline=soon())
        return self.tier


@pytest.fixture(scope="module")
def one_helper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kept]:
    kept = Kept(tmp_path_factory.mktemp("helper") / "store")
    yield kept
    kept.tier.close()


class TestAFilesystemInAHelper(TierConformance):
    @pytest.fixture
    def tier(self, one_helper: Kept) -> Tier:
        self.start = one_helper.start
        return one_helper.empty()

    def reopen(self, tier: Tier) -> Tier:
        return self.start()


@pytest.fixture
def wrong() -> Iterator[HelperTier]:
    tier = HelperTier(Wrong, name="wrong", where="[[l2]] #1")
    yield tier
    tier.close()


def answers(tier: HelperTier) -> bool:
    try:
        return tier.contains([key("k")], deadline=soon()) == [Outcome.FOUND]
    except TierError:
        return False


def ended(pid: int) -> bool:
    """A process that nothing has waited for is there, too."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def hold(tier: HelperTier) -> None:
    tier.contains([key("h")], deadline=time.monotonic() + 0.5)


def sleep(tier: HelperTier) -> None:
    tier.contains([key("s")], deadline=time.monotonic() + 0.5)


def stop(tier: HelperTier) -> None:
    assert tier.pid
    send(tier.pid, signal.SIGSTOP)
    tier.contains([key("k")], deadline=time.monotonic() + 0.5)


@pytest.mark.parametrize("freeze", [hold, sleep, stop])
def test_a_frozen_helper_is_killed_and_started_again(wrong: HelperTier, freeze: Callable[[HelperTier], None]) -> None:
    assert answers(wrong)
    first = wrong.pid
    assert first
    with pytest.raises(TierError, match="the deadline has passed"):
        freeze(wrong)
    wait_until(lambda: ended(first), what=f"its end, {FROZEN_S} s later")
    wait_until(lambda: answers(wrong))
    assert wrong.pid not in (None, first)


def test_a_helper_that_ends_is_started_again(wrong: HelperTier) -> None:
    with pytest.raises(TierError, match="the helper process"):
        wrong.contains([key("d")], deadline=soon())
    wait_until(lambda: answers(wrong))


def test_a_refusal_and_a_bug_come_back_and_end_nothing(wrong: HelperTier) -> None:
    assert answers(wrong)
    first = wrong.pid
    with pytest.raises(TierError, match="refused") as refused:
        wrong.contains([key("r")], deadline=soon())
    assert (refused.value.available, refused.value.hint) == ("nothing", "ask again")
    with pytest.raises(RuntimeError, match="KeyError in the helper: 'a bug'"):
        wrong.contains([key("b")], deadline=soon())
    assert answers(wrong)
    assert wrong.pid == first


def test_a_tier_that_cannot_be_made_is_a_tier_error_in_time() -> None:
    tier = HelperTier(unmakeable, name="unmakeable", where="[[l2]] #1")
    for _ in range(3):
        with pytest.raises(TierError):
            tier.contains([key("k")], deadline=time.monotonic() + 1.0)
    tier.close()


def test_a_helper_that_is_frozen_at_the_end_is_killed(wrong: HelperTier) -> None:
    assert answers(wrong)
    pid = wrong.pid
    assert pid
    send(pid, signal.SIGSTOP)
    wrong.close()
    assert ended(pid)


def test_a_frozen_helper_ends_with_its_server() -> None:
    script = (
        "import os, signal, time\n"
        "from kvframework.api.helper import HelperTier\n"
        "from tests.api.helper_tiers import Wrong\n"
        "tier = HelperTier(Wrong, name='wrong', where='')\n"
        "tier.contains([bytes(72)], deadline=time.monotonic() + 60)\n"
        "os.kill(tier.pid, signal.SIGSTOP)\n"
        "print(tier.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        pid = int(server.stdout.readline())
        server.kill()
    wait_until(lambda: not Path(f"/proc/{pid}").exists() or "(zombie)" in Path(f"/proc/{pid}/status").read_text())
