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
BUGS = {
    "off_by_one": (f"{CONTENT}[nhd]", "first at"),
    "wrong_stride": (f"{CONTENT}[hnd]", "first at"),
    "ignores_skip": ("test_skipped_tokens_are_not_written[nhd]", "47 tokens were skipped"),
    "forgets_the_event": ("test_a_store_holds_what_was_written_before_its_event", "assert"),
    "records_too_late": ("test_a_store_holds_what_was_written_before_its_event", "assert False"),
    "frees_early": ("test_nothing_is_answered_while_a_copy_stands_still", "DID NOT RAISE"),
    "copies_after_cancel": ("test_a_cancelled_load_touches_nothing_once_it_is_answered", "DID NOT RAISE"),
    "keeps_memory_open": ("test_after_the_end_of_an_instance_nothing_is_open", "once the memory is closed"),
    "exports_no_offset": (f"{CONTENT}[nhd]", "(?i)assert"),
    "takes_the_first_device": (f"{CONTENT}[nhd]", "wrong_device"),
    "opens_without_a_size": ("test_memory_smaller_than_it_says_is_refused", "DID NOT RAISE"),
    "loses_at_once": ("test_a_copy_that_fails_is_one_miss", "the copier ended"),
    "knows_no_loss": ("test_a_poisoned_context_ends_its_copier_and_the_next_one_works", "raise DeviceLost once"),
    "waits_for_the_engine": ("test_a_submit_does_not_wait_for_the_engines_work", "returned only after"),
    "synchronizes_first": ("test_what_waits_is_cancelled_while_another_copy_stands_still", "did not answer"),
    "keeps_events": ("test_after_the_end_of_an_instance_nothing_is_open", "every event is closed"),
    "keeps_opened_events": ("test_after_the_end_of_an_instance_nothing_is_open", "every event is closed"),
    "has_one_stream": ("test_a_transfer_does_not_wait_for_another_ones_event", "stood behind one"),
    "takes_anything_for_none": ("test_what_is_no_event_is_not_taken_for_none", "came too early"),
    "holds_nothing": (f"{STREAM}[its own]", "runs before a copy"),
    "never_releases": (f"{STREAM}[its own]", "end of a stream's wait"),
    "holds_the_thread": (f"{STREAM}[the current]", "thread waited for the transfer"),
    "holds_the_current_stream": (f"{STREAM}[its own]", "runs before a copy"),
    "waits_for_the_copy": ("test_a_submit_does_not_wait_for_copies", "assert"),
}


@pytest.fixture(scope="module")
def outcome() -> str:
    """What pytest says of all bugs, each with its test."""
    file = "tests/devices/planted_kit.py"
    chosen = [f"{file}::Test_{bug}::{test}" for bug, (test, _) in BUGS.items()]
    options = ["-q", "-rfE", "-p", "no:cacheprovider", "--tb=no", "-c", os.devnull, "--rootdir", "."]
    command = [sys.executable, "-m", "pytest", *options, *chosen]
    environment = {**os.environ, "COLUMNS": "400"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    return run.stdout + run.stderr


@pytest.mark.parametrize("bug", BUGS)
def test_the_kit_finds_it(outcome: str, bug: str) -> None:
    test, word = BUGS[bug]
    line = re.search(rf"^FAILED .*::Test_{bug}::{re.escape(test)} - (.*)$", outcome, re.MULTILINE)
    assert line, outcome
    assert re.search(word, line[1]), line[1]
