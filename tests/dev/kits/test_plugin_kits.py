"""The kits for eviction policies and codecs pass correct plugins, and each planted bug fails its test.

All run in a pytest of their own, in a directory outside of the repository, with the installed package only.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.dev.kits.kit_run import Results, run

HERE = Path(__file__).parent

# By file: the planted bug, the test that must fail for it, and what the failure says.
KILLED_BY = {
    "eviction_bug_cases.py": {
        "OffersWhatLeft": ("test_nothing_is_offered_where_nothing_is", "that is not in"),
        "OffersTheUsedTwice": ("test_all_that_is_in_is_offered_once", "a key is offered twice"),
        "HidesTheHot": ("test_all_that_is_in_is_offered_once", "that is in is not offered"),
        "RemembersRemovedKeysAsIn": ("test_a_key_that_comes_again_is_in_once", "that is in is not offered"),
        "GoesByIdentity": ("test_keys_are_equal_by_their_bytes", "KeyError"),
        "GoesByTheDigestAlone": ("test_keys_that_differ_in_one_byte_are_different", "that is in is not offered"),
        "SharesItsQueue": ("test_two_policies_have_nothing_in_common", "a key is offered that is not in"),
        "OfferingIsRemoving": ("test_asking_may_end_anywhere_and_changes_nobody", "that is in is not offered"),
        "PutsBackWhenTheWalkEnds": ("test_asking_may_end_anywhere_and_changes_nobody", "is not offered"),
        "LosesCountOfBytes": ("test_any_size_is_taken", "that is in is not offered"),
        "SearchesOnUse": ("test_a_call_takes_no_longer_where_more_is_in[on_access]", "on_access: "),
        "SortsForEachVictim": ("test_a_call_takes_no_longer_where_more_is_in[victims]", "victims: "),
        "SearchesOnRemoval": ("test_a_call_takes_no_longer_where_more_is_in[on_remove]", "on_remove: "),
        "TidiesUpOnEachInsert": ("test_a_call_takes_no_longer_where_more_is_in[on_insert]", "on_insert: "),
        "NeverForgets": ("test_what_has_left_is_forgotten", "6000 objects that came"),
        "KnowsOneThread": ("test_any_thread_may_call", "KeyError"),
    },
    "codec_bug_cases.py": {
        "ANameThatFitsNowhere": ("test_its_name_fits_into_an_envelope", "MAX_CODEC_NAME"),
        "StripsZeros": ("test_another_length_is_refused", "unpacked instead of raising ValueError"),
        "LosesWhatIsBehind64K": ("test_any_size_comes_back", "another object's bytes"),
        "AnswersAGenerator": ("test_the_packed_form_is_a_sequence_of_bytes", "several times"),
        "AnswersWords": ("test_the_packed_form_is_a_sequence_of_bytes", "itemsize"),
        "PacksAllIntoOneBuffer": ("test_a_batch_is_packed_before_it_is_sent", "were written over"),
        "KeepsADictionary": ("test_a_call_knows_nothing_of_others", "not known"),
        "PacksByPythonsHash": ("test_what_another_process_packed_is_unpacked", "ValueError"),
        "SharesAScratchBuffer": ("test_threads_do_not_disturb_each_other", "another object's bytes"),
        "FillsWhatItCan": ("test_another_length_is_refused", "unpacked instead of raising ValueError"),
        "TakesWhatIsCutOff": ("test_what_is_cut_off_is_refused", "packed bytes"),
        "TakesWhatComesBehind": ("test_what_is_more_than_was_packed_is_refused", "bytes behind"),
        "RaisesItsOwnError": ("test_what_was_never_packed_is_refused", "zlib.error"),
        "BelievesTheBytes": ("test_what_was_changed_is_refused", "changed bytes were unpacked"),
        "UnpacksBombs": ("test_a_small_place_takes_little_memory", "bytes were allocated for a place of 1000"),
        "WritesBesideThePlace": ("test_what_is_packed_is_unpacked", "bytes beside the object's place"),
        "AddsToWhatIsInThePlace": ("test_what_was_in_the_place_does_not_matter", "what was in the place"),
        "ShufflesInPlace": ("test_any_memory_is_packed_and_left_as_it_is", "still the caller's"),
        "NeedsWritableMemory": ("test_any_memory_is_packed_and_left_as_it_is", "not writable"),
        "KeepsTheObject": ("test_an_object_is_let_go_with_its_packed_bytes", "BufferError"),
        "KeepsThePlace": ("test_memory_is_let_go_when_a_call_has_ended", "BufferError"),
        "KeepsWhatFailed": ("test_memory_is_let_go_when_a_call_has_ended", "BufferError"),
    },
}

ALL = [(file, bug) for file, bugs in KILLED_BY.items() for bug in bugs]
RIGHT = {"eviction_bug_cases.py": "Policy", "codec_bug_cases.py": "Codec"}
NAMES = {"Policy": "test_it_has_the_plugins_name", "Codec": "test_its_name_fits_into_an_envelope"}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    chosen = [f"{file}::Test{bug}::{KILLED_BY[file][bug][0]}" for file, bug in ALL]
    chosen += [f"{file}::TestRight{kind}" for file, kind in RIGHT.items()]
    chosen += [f"{file}::TestNo{kind}::{NAMES[kind]}" for file, kind in RIGHT.items()]
    return run(tmp_path_factory.mktemp("kits"), *chosen)


@pytest.mark.parametrize("kind", RIGHT.values())
def test_a_correct_plugin_passes_every_test(results: Results, kind: str) -> None:
    passed = {test for (name, test), result in results.items() if name == f"Right{kind}"}
    for test in passed:
        if "the codec has no `options`" in results[f"Right{kind}", test].text:
            continue
        assert results[f"Right{kind}", test].outcomes == {"passed"}, results[f"Right{kind}", test].text
    (file,) = (file for file, each in RIGHT.items() if each == kind)
    assert {test.partition("[")[0] for test, _ in KILLED_BY[file].values()} <= passed


@pytest.mark.parametrize(("file", "bug"), ALL, ids=lambda each: each.removesuffix("_bug_cases.py"))
def test_a_planted_bug_fails_its_test(results: Results, file: str, bug: str) -> None:
    test, says = KILLED_BY[file][bug]
    result = results[bug, test.partition("[")[0]]
    assert "failure" in result.outcomes, result
    assert says in result.text


@pytest.mark.parametrize(("kind", "test"), NAMES.items())
def test_what_is_not_given_is_told(results: Results, kind: str, test: str) -> None:
    result = results[f"No{kind}", test]
    assert result.outcomes == {"error"}
    assert f"give `use`, the plugin's name, or a fixture `make_{kind.lower()}`" in result.text


def test_every_planted_bug_has_its_test() -> None:
    for file, bugs in KILLED_BY.items():
        planted = re.findall(r"^class Test(\w+)\(Planted\)", (HERE / file).read_text(), re.MULTILINE)
        assert planted == list(bugs)
