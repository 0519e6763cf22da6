"""A tier in a helper process keeps the contract of tiers, and what freezes or ends there costs `TierError`s."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from kvf_dev.testing import TierConformance
from kvf_filesystem import FilesystemOptions
from kvframework.api.helper_tier import FROZEN_S, HelperTier
from kvframework.api.plugin import ByteSize, NoOptions, Options
from kvframework.api.tier import Outcome, Tier, TierError
from kvframework.errors import PluginBroken
from tests.core.api import tiers_in_processes as tiers
from tests.core.api.tiers_in_processes import refused
from tests.support.processes import has_ended, send
from tests.support.waiting import wait_until


def soon() -> float:
    return time.monotonic() + 60.0


def key(deed: str) -> bytes:
    return deed.encode() * 72


class Kept:
    """A helper that one test after the other uses: its start is the most of what a test costs."""

    def __init__(self, folder: Path) -> None:
        self._options = FilesystemOptions(path=str(folder), capacity=ByteSize(1 << 30))
        self.tier = self.start()

    def start(self) -> HelperTier:
        optional = ("scan", "touch", "usage")
        return HelperTier(tiers.filesystem, self._options, name="filesystem", where="[[l2]] #1", capabilities=optional)

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
    tier = HelperTier(tiers.Wrong, NoOptions(), name="wrong", where="[[l2]] #1")
    yield tier
    tier.close()


def answers(tier: HelperTier) -> bool:
    try:
        return tier.contains([key("k")], deadline=soon()) == [Outcome.FOUND]
    except TierError:
        return False


def freeze(tier: HelperTier, deed: str) -> None:
    """A call that a frozen helper does not answer."""
    tier.contains([key(deed)], deadline=time.monotonic() + 0.5)


@pytest.mark.parametrize("deed", ["h", "s", "k"], ids=["hold", "sleep", "stop"])
def test_a_frozen_helper_is_killed_and_started_again(wrong: HelperTier, deed: str) -> None:
    assert answers(wrong)
    first = wrong.pid
    assert first
    if deed == "k":
        send(first, signal.SIGSTOP)
    with pytest.raises(TierError, match="the call's deadline has passed"):
        freeze(wrong, deed)

    def killed() -> bool:
        """After another call: on a busy machine the deadline of the first may have passed before it was sent."""
        if not has_ended(first):
            with contextlib.suppress(TierError):
                freeze(wrong, deed)
        return has_ended(first)

    wait_until(killed, what=f"its end, {FROZEN_S} s later")
    wait_until(lambda: answers(wrong))
    assert wrong.pid not in (None, first)


def test_a_helper_that_starts_slowly_is_not_frozen(tmp_path: Path) -> None:
    """Its tier is not made when the deadlines of the first calls have passed, `FROZEN_S` ago and longer."""
    tier = HelperTier(tiers.slow, tiers.SlowOptions(str(tmp_path / "go")), name="slow", where="[[l2]] #1")
    with pytest.raises(TierError, match="there is no helper process yet"):
        tier.contains([key("k")], deadline=time.monotonic() + 0.2)
    first = tier.pid
    assert first
    until = time.monotonic() + 2 * FROZEN_S
    while time.monotonic() < until:
        with pytest.raises(TierError, match="there is no helper process yet"):
            tier.contains([key("k")], deadline=time.monotonic() + 0.2)
    (tmp_path / "go").touch()
    assert tier.contains([key("k")], deadline=soon()) == [Outcome.FOUND]
    assert tier.pid == first
    tier.close()


def test_a_tier_that_is_never_made_ends_its_helper(tmp_path: Path) -> None:
    tier = HelperTier(tiers.slow, tiers.SlowOptions(str(tmp_path / "go")), name="slow", where="[[l2]] #1", start_s=2.0)
    with pytest.raises(TierError, match="the helper process was killed: not ready within 2 s"):
        tier.contains([key("k")], deadline=soon())
    tier.close()


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


def test_a_tier_that_cannot_be_made_is_a_tier_error_at_once() -> None:
    tier = HelperTier(tiers.unmakeable, NoOptions(), name="unmakeable", where="[[l2]] #1")
    for _ in range(3):
        # On a busy machine its interpreter may need longer to end than the supervisor waits.
        with pytest.raises(TierError, match=r"the helper process ended (with status 1|by signal SIGKILL)"):
            tier.contains([key("k")], deadline=soon())
    tier.close()


def test_a_store_that_refuses_to_be_opened_says_why_and_the_log_says_it_once(caplog: pytest.LogCaptureFixture) -> None:
    tier = HelperTier(refused, NoOptions(), name="refused", where="[[l2]] #1")
    for _ in range(3):
        with pytest.raises(TierError, match="the helper process could not make the tier: no store here; start it"):
            tier.contains([key("k")], deadline=soon())
    tier.close()
    said = [each.message for each in caplog.records if each.levelname == "ERROR"]
    assert said == ["tier refused: the helper process could not make the tier: no store here; start it"]


def test_nothing_arrives_after_the_end_of_a_call() -> None:
    """The helper goes on to write, until it is killed and while the next call has buffers, too."""
    tier = HelperTier(tiers.Late, NoOptions(), name="late", where="[[l2]] #1")
    tier.contains([key("k")], deadline=soon())
    first, rooms = tier.pid, [bytearray(1 << 20), bytearray(1 << 20)]
    assert first
    for room in rooms:
        with pytest.raises(TierError, match="the call's deadline has passed"):
            tier.get_into([key("k")], [[memoryview(room)]], deadline=time.monotonic() + 0.5)
    wait_until(lambda: has_ended(first))
    assert [bytes(room) for room in rooms] == [bytes(1 << 20)] * 2
    tier.close()


def test_a_tier_that_registers_memory_knows_that_of_every_value() -> None:
    tier = HelperTier(tiers.Registering, NoOptions(), name="registering", where="[[l2]] #1")
    for nbytes in (1, 1 << 20, 3 << 20, 80):  # the memory grows
        value = memoryview(bytes(nbytes))
        assert (
            tier.put([key("a"), key("b")], [[value], [value[:1], value[1:]]], deadline=soon()) == [Outcome.STORED] * 2
        )
    for _ in range(2):  # what failed is tried again
        with pytest.raises(TierError, match="too much to register"):
            tier.put([key("a")], [[memoryview(bytes(9 << 20))]], deadline=soon())
    assert tier.put([key("a")], [[memoryview(b"value")]], deadline=soon()) == [Outcome.STORED]
    tier.close()


def test_a_helper_that_is_frozen_at_the_end_is_killed(wrong: HelperTier) -> None:
    assert answers(wrong)
    pid = wrong.pid
    assert pid
    send(pid, signal.SIGSTOP)
    wrong.close()
    assert has_ended(pid)


def test_a_frozen_helper_ends_with_its_server() -> None:
    script = (
        "import time\n"
        "from kvframework.api.helper_tier import HelperTier\n"
        "from kvframework.api.plugin import NoOptions\n"
        "from tests.core.api.tiers_in_processes import Wrong\n"
        "tier = HelperTier(Wrong, NoOptions(), name='wrong', where='')\n"
        "tier.contains([bytes(72)], deadline=time.monotonic() + 60)\n"
        "print(tier.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            pid = int(server.stdout.readline())
            send(pid, signal.SIGSTOP)
        finally:
            server.kill()
    wait_until(lambda: has_ended(pid))


def make_here(options: NoOptions, where: str) -> Tier:
    return tiers.Wrong(options, where)


def test_what_makes_the_tier_is_found_by_its_name() -> None:
    def inner(options: NoOptions, where: str) -> Tier:
        return tiers.Wrong(options, where)

    class Inner(Options, frozen=True):
        """Options that no other process finds."""

    for make in (inner, lambda options, where: tiers.Wrong(options, where), partial(make_here)):
        with pytest.raises(PluginBroken, match="cannot be found by its name") as refused:
            HelperTier(make, NoOptions(), name="mine", where="[[l2]] #1")
        assert refused.value.where == "[[l2]] #1"
        assert refused.value.available == "a function or class at the top of an importable module"
    with pytest.raises(PluginBroken, match=r"<locals>.Inner of tests.core.api.test_helper_tier cannot be found"):
        HelperTier(make_here, Inner(), name="mine", where="[[l2]] #1")
    with pytest.raises(PluginBroken, match="the options have type dict"):
        HelperTier(make_here, {}, name="mine", where="[[l2]] #1")  # type: ignore[type-var]
