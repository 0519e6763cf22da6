"""Prefetch: what L2 holds comes into L1, and whatever goes wrong is a miss that leaves nothing behind."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from kvframework.api.keys import PackedKey
from kvframework.storage.l2 import loading, prefetch
from kvframework.storage.l2.sealed_tier import L2Store
from kvframework.storage.namespaces import HEADER_BYTES, NamespaceRecord, record_key
from tests.core.storage.memory import NAMESPACE, content, packed_key
from tests.core.storage.node import DESC, OWNER, SIZE, MakeNode, Node, prefix
from tests.core.storage.tier import MemoryTier, in_envelope
from tests.support.waiting import wait_until

K = [packed_key(number) for number in range(300)]
RECORD = NamespaceRecord("llama", 1, DESC)


def filled(keys: Sequence[PackedKey]) -> MemoryTier:
    return MemoryTier({key: in_envelope(key, content(key, SIZE)) for key in keys})


def test_loads_what_is_missing_and_only_that(make_node: MakeNode) -> None:
    node = make_node(tiers=[filled(K[:40])])
    node.write(K[:10])
    task = node.load(K[:50])
    assert task.loaded == 30
    assert node.table.which_present(K[:50]) == [True] * 40 + [False] * 10
    assert node.read(K[:40])
    assert node.tier.asked("get") == K[10:40]
    assert set(node.tier.asked("contains")) == set(K[10:50])
    node.assert_idle()


def test_tiers_are_asked_in_their_order(make_node: MakeNode) -> None:
    node = make_node(tiers=[filled(K[:6]), filled(K[3:9])])
    assert node.load(K[:9]).loaded == 9
    assert node.tiers[0].asked("get") == K[:6]
    assert node.tiers[1].asked("get") == K[6:9]
    assert node.tiers[1].asked("contains") == K[6:9]
    assert node.read(K[:9])


def test_a_tier_that_is_down_is_passed_over(make_node: MakeNode) -> None:
    node = make_node(tiers=[filled(K[:6]), filled(K[:6])])
    node.tiers[0].down = True
    assert node.load(K[:6]).loaded == 6
    assert node.read(K[:6])


def test_no_load_tries_a_tier_that_failed_but_a_thread_of_its_own(make_node: MakeNode) -> None:
    node = make_node(tiers=[filled(K[:4])])
    node.tier.down = True
    while node.stores[0].state == "closed":
        node.load(K[:4])
    questions = len(node.tier.asked("contains"))

    def tried(times: int) -> bool:
        assert node.load(K[:4]).loaded == 0
        return [name for name, _ in node.tier.calls].count("ping") >= times

    wait_until(lambda: tried(4), what="the tier to be tried several times")
    assert len(node.tier.asked("contains")) == questions, "a load waited for a tier that had failed"
    node.tier.down = False
    wait_until(lambda: node.stores[0].state == "closed", what="the circuit to close")
    assert node.load(K[:4]).loaded == 4


def test_selects_what_is_worth_having(make_node: MakeNode) -> None:
    node = make_node(tiers=[filled(K[:3] + K[4:8])])
    asked: list[list[bool]] = []

    def select(available: Sequence[bool]) -> Sequence[int]:
        asked.append(list(available))
        return prefix(available)

    assert node.load(K[:8], select=select).loaded == 3
    assert asked == [[True] * 3 + [False] + [True] * 4]
    assert node.tier.asked("get") == K[:3]


@pytest.mark.parametrize("fault", ["corrupt", "lost", "truncated", "foreign"])
def test_a_bad_value_is_a_miss_and_what_hangs_on_it_is_not_loaded(
    make_node: MakeNode, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    node = make_node(tiers=[filled(K[:48])], loads=1)
    bad, values = K[20], node.tier.values
    if fault == "corrupt":
        values[bad] = values[bad][:-1] + bytes([values[bad][-1] ^ 1])
    elif fault == "truncated":
        values[bad] = values[bad][:-1]
    elif fault == "foreign":
        values[bad] = values[K[21]]
    else:
        node.tier.lost = {bad}
    task = node.load(K[:48], select=prefix)
    assert node.read(K[:20])
    assert node.present([bad]) == 0
    assert task.loaded == 31, "its own batch was under way"
    assert not set(node.tier.asked("get")) & set(K[32:])
    if fault != "lost":
        assert bad not in values
        assert node.store_counters["corrupt"] == 1
        assert "unusable" in caplog.text
    node.assert_idle()
    assert node.write([bad]) == 1
    assert node.read([bad])


@pytest.mark.parametrize("fault", ["down", "raises", "miscounts"])
def test_a_tier_that_fails_on_the_way_leaves_a_partial_prefix(make_node: MakeNode, fault: str) -> None:
    node = make_node(tiers=[filled(K[:48])], loads=1)
    node.tier.stall("get")
    task = node.load_in_background(K[:48])
    node.wait_stalled()
    original = node.tier.get_into

    def fail_after_this(*arguments: object, **named: object) -> object:
        setattr(node.tier, fault, ValueError("a bug in the plugin") if fault == "raises" else True)
        return original(*arguments, **named)  # type: ignore[arg-type]

    node.tier.get_into = fail_after_this  # type: ignore[method-assign,assignment]
    node.tier.resume()
    wait_until(lambda: task.done)
    assert task.loaded == 16
    assert node.table.which_present(K[:48]) == [True] * 16 + [False] * 32
    assert node.read(K[:16])
    node.assert_idle()


def test_a_tier_too_slow_for_its_deadline_is_a_miss(make_node: MakeNode) -> None:
    node = make_node(tiers=[filled(K[:4])], timeout_s=0.05)
    node.tier.stall("get")
    assert node.load(K[:4]).loaded == 0
    node.assert_idle()
    node.tier.resume()
    assert node.load(K[:4]).loaded == 4


def test_cancel_ends_a_load_after_its_batch(make_node: MakeNode) -> None:
    node = make_node(tiers=[filled(K[:48])], loads=1)
    done: list[int] = []
    node.tier.stall("get")
    task = node.load_in_background(K[:48], lambda: done.append(1))
    node.wait_stalled()
    task.cancel()
    node.tier.resume()
    wait_until(lambda: task.done)
    assert task.loaded == 16
    assert done == [1]
    node.assert_idle()
    cancelled = node.load_in_background(K[:1])
    cancelled.cancel()
    wait_until(lambda: cancelled.done)


def test_a_load_larger_than_l1_keeps_the_prefix_that_fits(make_node: MakeNode) -> None:
    # One batch at a time: of two, the later one may find its place first.
    node = make_node(tiers=[filled(K[:64])], units=20, loads=1)
    task = node.load(K[:64], select=prefix)
    assert task.loaded == 20
    assert node.table.which_present(K[:64]) == [True] * 20 + [False] * 44
    assert not set(node.tier.asked("get")) & set(K[20:])
    node.assert_idle()


def test_what_a_load_builds_upon_is_not_pushed_out_by_it(make_node: MakeNode) -> None:
    """The start of the prompt is in L1, and the least recently used there."""
    node = make_node(tiers=[filled(K[:8])], units=8)
    node.write(K[:4])
    node.write(K[100:104])
    wait_until(lambda: node.manager.tiers.status()["l2"][0]["write_pending"] == 0, what="the write to L2, which pins")
    node.assert_idle()
    node.load(K[:8], select=prefix)
    assert node.read(K[:8])


def test_two_loads_of_the_same_both_see_it(make_node: MakeNode) -> None:
    node = make_node(tiers=[filled(K[:20])])
    seen: list[list[bool]] = []

    def look() -> None:
        # Whoever is in on_done has all of it pinned: clearing takes nothing away.
        node.manager.clear()
        seen.append(node.table.which_present(K[:20]))

    node.tier.stall("get")
    first = node.load_in_background(K[:20], look)
    node.wait_stalled()
    second = node.load_in_background(K[:20], look)
    wait_until(lambda: len(node.tier.asked("contains")) == 40, what="the second load")
    node.tier.resume()
    wait_until(lambda: first.done and second.done)
    assert seen == [[True] * 20] * 2
    assert first.loaded + second.loaded >= 20
    node.assert_idle()


@pytest.mark.parametrize("end", ["commit", "abort", "end_owner"])
def test_a_load_waits_for_a_writer_and_takes_over_if_it_gives_up(make_node: MakeNode, end: str) -> None:
    node = make_node(tiers=[filled(K[:4])], timeout_s=60.0)
    reserved = node.table.reserve([(K[1], SIZE)], owner=OWNER)
    assert reserved.lease is not None
    task = node.load_in_background(K[:4])
    wait_until(lambda: node.present(K[:4]) == 3)
    assert not task.done
    if end == "commit":
        offset = reserved.placed[0][1]
        node.table.arena[offset : offset + SIZE] = content(K[1], SIZE)
        node.table.commit(reserved.lease.id, owner=OWNER)
    elif end == "abort":
        node.table.abort(reserved.lease.id, owner=OWNER)
    else:
        node.table.end_owner(OWNER)
    wait_until(lambda: task.done)
    assert task.loaded == (3 if end == "commit" else 4)
    assert node.read(K[:4])
    node.assert_idle()


def test_loads_that_wait_for_a_writer_hold_up_no_others(make_node: MakeNode) -> None:
    node = make_node(tiers=[filled(K[:30])], timeout_s=60.0)
    stuck = node.table.reserve([(K[0], SIZE)], owner=OWNER)
    assert stuck.lease is not None
    waiting = [node.load_in_background(K[:1]) for _ in range(20)]
    wait_until(lambda: len(node.tier.asked("contains")) == 20, what="all to wait for the writer")
    for number in range(1, 11):
        assert node.load(K[number : number + 1]).loaded == 1
    assert not any(task.done for task in waiting)
    waiting[0].cancel()
    node.table.abort(stuck.lease.id, owner=OWNER)
    wait_until(lambda: all(task.done for task in waiting), what="the writer's end to wake them")
    assert node.read(K[:1])
    assert sum(task.loaded for task in waiting) == 1, "one took the writer's place, the others saw it"
    node.assert_idle()


def test_a_load_does_not_wait_for_a_writer_for_ever(make_node: MakeNode) -> None:
    node = make_node(tiers=[filled(K[:4])], timeout_s=0.2)
    stuck = node.table.reserve([(K[1], SIZE)], owner=OWNER)
    assert stuck.lease is not None
    assert node.load(K[:4]).loaded == 3
    node.table.abort(stuck.lease.id, owner=OWNER)
    node.assert_idle()


def test_loads_that_wait_end_with_the_manager(make_node: MakeNode) -> None:
    node = make_node(tiers=[filled(K[:1])], timeout_s=60.0)
    stuck = node.table.reserve([(K[0], SIZE)], owner=OWNER)
    assert stuck.lease is not None
    done: list[int] = []
    for _ in range(5):
        node.load_in_background(K[:1], lambda: done.append(1))
    wait_until(lambda: len(node.tier.asked("contains")) == 5)
    node.manager.close()
    assert len(done) == 5
    assert node.manager.status()["prefetch"] == {"in_flight": 0, "refused": 0}


def test_a_slow_tier_holds_up_no_load_that_asks_another(make_node: MakeNode) -> None:
    """All threads of the first tier receive; what the second one holds comes meanwhile."""
    slow, quick = filled(K[:2]), filled(K[2:20])
    node = make_node(tiers=[slow, quick], timeout_s=60.0)
    quick.stall("get")
    tasks = [node.load_in_background(K[number : number + 1]) for number in range(2, 20)]
    wait_until(lambda: len(slow.asked("contains")) == 18, what="the first tier to be asked by all")
    slow.stall("get")
    held = [node.load_in_background(K[number : number + 1]) for number in range(2)]
    wait_until(lambda: slow.stalled == 2, what="both threads of the first tier to be held")
    quick.resume()
    wait_until(lambda: all(task.done for task in tasks))
    assert sum(task.loaded for task in tasks) == 18
    slow.resume()
    wait_until(lambda: all(task.done for task in held))
    assert node.read(K[:20])
    node.assert_idle()


@pytest.mark.parametrize("loads", [1, 5])
def test_as_many_loads_as_told_call_a_tier_at_once(make_node: MakeNode, loads: int) -> None:
    node = make_node(tiers=[filled(K[:20])], timeout_s=60.0, loads=loads)
    node.tier.stall("get")
    tasks = [node.load_in_background(K[number : number + 1]) for number in range(20)]
    wait_until(lambda: node.tier.stalled == loads, what="the threads to be held")
    assert node.manager.status()["l2"][0]["pending_calls"] == loads  # type: ignore[index]
    node.tier.resume()
    wait_until(lambda: all(task.done for task in tasks))
    assert node.read(K[:20])


def test_one_prompt_is_fetched_by_several_threads_in_order(make_node: MakeNode) -> None:
    node = make_node(tiers=[filled(K[:80])], timeout_s=60.0, units=200, loads=3)
    node.tier.stall("get")
    task = node.load_in_background(K[:80])
    wait_until(lambda: node.tier.stalled == 3, what="three batches at once")
    assert sorted(node.tier.asked("get")) == sorted(K[:48])
    node.tier.resume()
    wait_until(lambda: task.done)
    assert task.loaded == 80
    assert node.read(K[:80])
    node.assert_idle()


@pytest.mark.parametrize(
    ("objects", "mib", "threads", "lengths"),
    [
        (32, 3, 4, [4] * 8),
        (32, 3, 1, [5] * 6 + [2]),
        (8, 32, 4, [1] * 8),
        (8, 1, 4, [4, 4]),
        (6, 0.001, 4, [6]),
        (40, 0.001, 4, [16, 16, 8]),
    ],
)
def test_the_threads_of_a_tier_get_as_much_each(objects: int, mib: float, threads: int, lengths: list[int]) -> None:
    store = L2Store(MemoryTier(), timeout_s=1.0)
    indices = range(objects)
    sizes = [int(mib * (1 << 20))] * objects
    batches = loading._batches(
        indices, dict.fromkeys(indices, store), sizes, {store: loading._batch_bytes(sum(sizes), threads)}
    )
    assert [len(batch) for batch in batches] == lengths
    assert [index for batch in batches for index in batch] == list(indices)


def test_what_is_loaded_ahead_lets_all_others_go_first(make_node: MakeNode) -> None:
    """Its batches take one thread at most, and none while another load waits."""
    node = make_node(tiers=[filled(K[:160])], timeout_s=60.0, units=200, loads=2)
    node.tier.stall("get")
    ahead = node.load_in_background(K[:80], ahead=True)
    wait_until(lambda: node.tier.stalled == 1, what="the first batch")
    asked = node.load_in_background(K[80:160])
    wait_until(lambda: node.tier.stalled == 2, what="a batch of the other load")
    node.tier.resume()
    wait_until(lambda: ahead.done and asked.done)
    assert (ahead.loaded, asked.loaded) == (80, 80)
    later = [K.index(key) for key in node.tier.asked("get")[32:]]
    assert [index < 80 for index in later] == [False] * 64 + [True] * 64
    node.assert_idle()


def test_a_question_is_answered_while_all_batches_are_held(make_node: MakeNode) -> None:
    node = make_node(tiers=[filled(K[:80])], timeout_s=60.0, units=200, loads=2)
    node.tier.stall("get")
    held = node.load_in_background(K[:80])
    wait_until(lambda: node.tier.stalled == 2, what="all batches")
    assert node.load(K[100:104]).loaded == 0
    assert not held.done
    node.tier.resume()
    wait_until(lambda: held.done)
    node.assert_idle()


def test_a_long_load_takes_turns_with_a_short_one(make_node: MakeNode) -> None:
    node = make_node(tiers=[filled(K[:200])], timeout_s=60.0, units=200, loads=1)
    node.tier.stall("get")
    long = node.load_in_background(K[:160])
    node.wait_stalled()
    short = node.load_in_background(K[160:164])
    wait_until(lambda: node.manager.tiers._prefetcher.queues[0]._batches, what="the batch of the short load")
    node.tier.resume()
    wait_until(lambda: long.done and short.done)
    assert node.tier.asked("get").index(K[160]) == 16, "one batch was under way"
    assert node.read(K[:164])


def test_a_bug_in_one_batch_ends_its_load_after_the_others(
    make_node: MakeNode, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = make_node(tiers=[filled(K[:48])], timeout_s=60.0, loads=3)
    reserve = node.table.reserve_load

    def broken(key: PackedKey, *arguments: Any) -> Any:
        if key == K[20]:
            raise RuntimeError("a bug below")
        return reserve(key, *arguments)

    monkeypatch.setattr(node.table, "reserve_load", broken)
    assert node.load(K[:48]).loaded == 32
    assert "a load failed" in caplog.text
    node.assert_idle()


def test_an_error_in_on_done_or_select_ends_only_its_own_task(
    make_node: MakeNode, caplog: pytest.LogCaptureFixture
) -> None:
    node = make_node(tiers=[filled(K[:4])])

    def fail() -> None:
        raise RuntimeError("a bug above")

    def choose(_available: Sequence[bool]) -> range:
        raise RuntimeError("a bug above")

    tasks = [node.load_in_background(K[:2], fail) for _ in range(3)]
    wait_until(lambda: all(task.done for task in tasks))
    assert node.load(K[2:4], select=choose).loaded == 0
    assert "a bug above" in caplog.text
    assert node.load(K[2:4]).loaded == 2
    node.assert_idle()


def test_on_done_may_ask_for_more(make_node: MakeNode) -> None:
    node = make_node(tiers=[filled(K[:4])])
    tasks = []
    node.load_in_background(K[:2], lambda: tasks.append(node.load_in_background(K[2:4])))
    wait_until(lambda: tasks and tasks[0].done)
    assert node.read(K[:4])


def test_too_many_loads_are_refused(make_node: MakeNode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "MAX_TASKS", 3)
    node = make_node(tiers=[filled(K[:4])])
    node.tier.stall("contains")
    tasks = [node.load_in_background(K[:1]) for _ in range(3)]
    assert node.manager.tiers.submit_prefetch_task(K[:1], DESC) is None
    assert node.manager.tiers.submit_record_task(NAMESPACE, lambda: None) is False
    assert node.manager.status()["prefetch"] == {"in_flight": 3, "refused": 2}
    node.tier.resume()
    wait_until(lambda: all(task.done for task in tasks))
    wait_until(lambda: node.manager.tiers.submit_prefetch_task(K[:1], DESC) is not None)


def ask_record(node: Node) -> NamespaceRecord | None:
    done: list[int] = []
    assert node.manager.tiers.submit_record_task(NAMESPACE, lambda: done.append(1))
    wait_until(lambda: done, what="the answer")
    assert done == [1]
    found = node.manager.records.get(NAMESPACE)
    return found and msgspec.structs.replace(found, used_at=0)  # the time of its writing


def test_another_node_learns_the_namespace_from_l2(make_node: MakeNode) -> None:
    shared: dict[PackedKey, bytes] = {}
    writer, reader = make_node(tiers=[MemoryTier(shared)]), make_node(tiers=[MemoryTier(shared)])
    assert ask_record(reader) is None
    writer.manager.records.add(NAMESPACE, RECORD)
    writer.write(K[:4])
    wait_until(lambda: K[3] in shared)
    assert ask_record(reader) == RECORD
    assert reader.load(K[:4]).loaded == 4
    assert reader.read(K[:4])


@pytest.mark.parametrize("fault", ["down", "raises", "miscounts"])
def test_the_answer_on_a_namespace_comes_also_from_a_tier_in_trouble(node: Node, fault: str) -> None:
    setattr(node.tier, fault, ValueError("a bug in the plugin") if fault == "raises" else True)
    assert ask_record(node) is None


def test_a_damaged_record_is_deleted_and_the_next_tier_asked(make_node: MakeNode) -> None:
    sound = MemoryTier()
    writer = make_node(tiers=[sound])
    writer.manager.records.add(NAMESPACE, RECORD)
    writer.write(K[:1])
    wait_until(lambda: record_key(NAMESPACE) in sound.values)
    value = sound.values[record_key(NAMESPACE)]
    absurd = bytes(len(value) - HEADER_BYTES)
    key = record_key(NAMESPACE)
    tiers = [
        MemoryTier({key: value[:-1] + b"!"}),
        MemoryTier({key: in_envelope(key, absurd)}),
        MemoryTier({key: value}),
    ]
    assert ask_record(make_node(tiers=tiers)) == RECORD
    assert key not in tiers[0].values


def test_a_record_that_contradicts_what_is_known_changes_nothing(
    make_node: MakeNode, caplog: pytest.LogCaptureFixture
) -> None:
    shared: dict[PackedKey, bytes] = {}
    writer, reader = make_node(tiers=[MemoryTier(shared)]), make_node(tiers=[MemoryTier(shared)])
    writer.manager.records.add(NAMESPACE, NamespaceRecord("other", 1, DESC))
    writer.write(K[:1])
    wait_until(lambda: record_key(NAMESPACE) in shared)
    reader.manager.records.add(NAMESPACE, RECORD)
    with caplog.at_level(logging.ERROR):
        assert ask_record(reader) == RECORD
        wait_until(lambda: "request.namespace" in caplog.text)
