"""Every planted bug is found by the test of the kit that is there for it, and that test alone would do."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

CONTENT = "test_what_is_stored_comes_back_in_other_blocks"
STREAM = "test_a_stream_waits_for_a_load_and_the_engines_thread_does_not"
# bug -> the test that is to find it, and what the failure is to say
LEFT = "test_after_the_end_of_an_instance_nothing_is_open"
NEIGHBOURS = "test_fragments_of_neighbouring_allocations_are_apart"
ANYWHERE = "test_objects_may_lie_anywhere_in_the_arena"
TWO = "test_two_devices_do_not_mix"
BUGS = {
    "merges_neighbours": (NEIGHBOURS, "A store across allocations failed"),
    "copies_so_many": ("test_a_long_request_is_copied_whole[dim_before_token]", "A request of 24 chunks"),
    "offsets_of_20_bits": (ANYWHERE, "after other stores"),
    "pins_the_first_slice": (ANYWHERE, "must register each slice of the arena"),
    "has_one_copy_stream": ("test_a_load_does_not_wait_for_a_store_that_stands_still", "A load waited for a store"),
    "opens_any_device": ("test_memory_of_another_device_is_refused", "Opening memory of another device was accepted"),
    "opens_once": (f"{CONTENT}[latent]", "A byte is wrong"),
    "reaches_what_failed": ("test_a_copy_that_fails_is_one_miss[load]", "was answered as a hit"),
    "copies_at_once": ("test_what_waits_is_cancelled_while_another_copy_stands_still", "A cancel waited for"),
    "records_before": ("test_nothing_is_answered_while_a_copy_stands_still", "ended while its copy was paused"),
    "keeps_streams": (LEFT, "all streams of a closed instance"),
    "exports_each_tensor": ("test_tensors_of_one_allocation_are_found[latent]", "a view with 27 blocks"),
    "takes_the_default_stream": ("test_what_is_no_stream_is_not_taken_for_the_current_one", "not a stream"),
    "the_last_of_the_process": (TWO, "another device"),
    "releases_once": ("test_a_blocked_stream_is_released[twice]", "second call of `release` .twice. raised"),
    "releases_while_it_is_open": ("test_a_blocked_stream_is_released[after close]", "a stream to go on after"),
    "forgets_its_runtime": ("test_events_are_destroyed_after_close", "`destroy_event` after `close` raised"),
    "takes_any_device": ("test_a_copier_of_a_device_that_the_machine_lacks_is_refused[another]", "create_copier"),
    "off_by_one": (f"{CONTENT}[nhd]", "first at"),
    "wrong_stride": (f"{CONTENT}[hnd]", "first at"),
    "ignores_skip": ("test_skipped_tokens_are_not_written[nhd]", "47 tokens were skipped"),
    "forgets_the_event": ("test_a_store_holds_what_was_written_before_its_event", "A transfer failed|A byte is wrong"),
    "copies_after_cancel": ("test_what_is_cancelled_is_answered_once_it_touches_nothing[load]", "ended while its copy"),
    "keeps_memory_open": ("test_after_the_end_of_an_instance_nothing_is_open", "close memory before unregistering"),
    "exports_no_offset": (f"{CONTENT}[nhd]", "ends at byte"),
    "opens_without_a_size": ("test_memory_smaller_than_it_says_is_refused", "smaller than its `nbytes`"),
    "loses_at_once": ("test_a_copy_that_fails_is_one_miss[store]", "The copier ended"),
    "knows_no_loss": ("test_a_poisoned_context_ends_its_copier_and_the_next_one_works", "raise DeviceLost once"),
    "waits_for_the_engine": ("test_a_submit_does_not_wait_for_the_engines_work", "waited for the engine's work"),
    "keeps_events": ("test_after_the_end_of_an_instance_nothing_is_open", "close and destroy each"),
    "has_one_stream": ("test_a_transfer_does_not_wait_for_another_ones_event", "A ready transfer waited"),
    "takes_anything_for_none": ("test_what_is_no_event_is_not_taken_for_none", "not an event was accepted"),
    "holds_nothing": (f"{STREAM}[its own]", "runs before a copy"),
    "never_releases": (f"{STREAM}[its own]", "a stream to go on after a transfer"),
    "holds_the_thread": (f"{STREAM}[the current]", "thread waited for the transfer"),
    "waits_for_the_copy": ("test_a_submit_does_not_wait_for_copies", "A submit during a copy took"),
}


@pytest.fixture(scope="module")
def outcome() -> str:
    """What pytest says of all bugs, each with its test."""
    file = "tests/devices/planted_kit.py"
    chosen = [f"{file}::Test_{bug}::{test}" for bug, (test, _) in BUGS.items()]
    options = ["-q", "-rfE", "-p", "no:cacheprovider", "--tb=no", "-c", os.devnull, "--rootdir", "."]
    command = [sys.executable, "-m", "pytest", *options, *chosen]
    environment = {**os.environ, "COLUMNS": "400"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=480, check=False)
    return run.stdout + run.stderr


@pytest.mark.parametrize("bug", BUGS)
def test_the_kit_finds_it(outcome: str, bug: str) -> None:
    test, word = BUGS[bug]
    line = re.search(rf"^FAILED .*::Test_{bug}::{re.escape(test)}(?:\[.*?\])? - (.*)$", outcome, re.MULTILINE)
    assert line, outcome
    assert re.search(word, line[1]), line[1]
