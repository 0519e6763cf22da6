"""Each of many planted bugs fails a test of its kit, and the failure begins with the promise that the test is named by.

The bugs are in the files `*_plants_cases.py`, a line each; here stands the test that is there for each.
"""
# ruff: noqa: E501  a line a test

from __future__ import annotations

import re

import pytest

from tests.dev.kits.kit_run import HERE, Results, run

# The runs of all bugs of a kit are one fixture.
pytestmark = pytest.mark.timeout(1800)

# By file and test: the bugs that it finds.
KILLED_BY = {
    "codec_plants_cases.py": {
        "test_one_bit_at_either_end_is_noticed[noise]": "SumsTheBeginning SumOf8Bits NoSum SumsTheLength SumsEverySecondByte",
        "test_every_kind_of_damage_is_noticed[text]": "SumsTheEnds AddsUp XorsBytes",
        "test_another_length_is_refused[text]": "ChecksNoSum",
        "test_a_claim_takes_no_memory": "BelievesTheHeader BelievesTheHeaderUpToALimit BelievesABigEndianHeader",
        "test_a_small_place_takes_little_memory": "ReservesTwentyTimesThePlace",
        "test_what_is_more_than_was_packed_is_refused[text]": "DropsZerosBehind DropsALineEnd SearchesItsMagic",
        "test_what_is_cut_off_is_refused[text]": "IgnoresAShortHeader FillsWithZeros RaisesEofError RaisesStructError RaisesIndexError",
        "test_it_works_after_an_error": "RaisesRuntimeError",
        "test_what_is_packed_is_unpacked[text]": "ItsOwnMagicIsPacked",
        "test_what_is_packed_is_unpacked[runs]": "RunsOf256",
        "test_what_is_packed_is_unpacked[every pair]": "ThroughFloats",
        "test_every_small_size_comes_back": "LosesAnOddByte LosesAWholeLastBlock LosesTheTailOfWords TakesWholeWordsOnly CannotPackNothing RemembersByLength",
        "test_any_size_comes_back[1048576]": "LossyFromAMebibyteOn",
        "test_elements_of_any_dtype_come_back[float16]": "TakesWholeElementsOnly BelievesTheDtype",
        "test_elements_of_any_dtype_come_back[a dtype of later releases]": "KnowsTodaysDtypesOnly",
        "test_memory_may_begin_at_any_address[noise]": "ReadsFromAlignedAddresses TurnsFromAlignedAddressesOn WritesWholeWords ClearsBeforeThePlace",
        "test_memory_is_let_go_when_a_call_has_ended[damaged]": "KeepsTheError",
        "test_it_keeps_nothing_of_its_calls": "KeepsAllPackedBytes KeepsAThreadForEach",
        "test_objects_that_differ_in_one_byte_are_different": "RemembersByBothEnds RemembersByAddress",
        "test_a_batch_is_packed_before_it_is_sent": "AnswersTheSameList",
        "test_threads_do_not_disturb_each_other": "KeepsTheSizeInItself",
        "test_threads_do_not_disturb_each_other_at_any_step": "KeepsTheBytesForAnInstant",
        "test_neither_an_object_nor_packed_bytes_are_written_even_for_an_instant": "PacksInPlaceAndRestores",
        "test_the_packed_form_is_a_sequence_of_bytes": "AnswersBytes AnswersOneView AnswersTwoDimensions AnswersEverySecondByte AnswersNone",
        "test_any_memory_is_packed_and_left_as_it_is[mapping]": "WritesToTheObject",
    },
    "eviction_plants_cases.py": {
        "test_all_that_is_in_is_offered_once": "HidesTheNewest HidesTheOldest HidesWhatWasJustUsed HidesWhatIsYoung NeverEnds"
        " SkipsWhatItOfferedBefore ForgetsAtTheSecondUse LosesTheLastOfItsList RemovesTheHeadWhateverLeaves"
        " AnswersAList OffersHex OffersViews OffersPairs KnowsAShortHash",
        "test_any_size_is_taken": "HidesTheLarge HidesTheTiny SizesOf32Bits",
        "test_as_many_objects_as_a_large_l1_holds_are_offered": "HoldsAThousand OffersAThousand RecursesForEach ManyTakesListsOnly",
        "test_a_key_that_comes_again_is_in_once": "EntersGhostsTwice",
        "test_keys_that_differ_in_one_byte_are_different": "KnowsTheDigestOfTheKey KnowsTheEndOfTheKey",
        "test_two_policies_have_nothing_in_common": "SharesADefault",
        "test_nothing_is_offered_where_nothing_is": "RaisesOnAnEmptyWalk",
        "test_an_object_may_be_used_very_often": "CountsUsesInAByte CountsUsesIn16Bits",
        "test_many_accesses_at_once_are_as_many_one_by_one[40]": "ManyForgetsTheLast ManyBackwards ManyEachOnce ManyIsNothing"
        " ManySortsTheCallersList ManyEmptiesTheCallersList",
        "test_many_accesses_at_once_are_as_many_one_by_one[8192]": "ManyTakesTheFirstThousand ManyTakesEach8191",
        "test_a_call_of_a_large_policy_is_as_quick": "CopiesAllForAWalk SortsNumbers AddsUpAllBytes LooksForTheLeast CopiesAtEachUse"
        " HeapifiesEachBatch CountsAllBehindTheFirst Sleeps SleepsInAWalk",
        "test_uses_are_not_kept_one_by_one": "KeepsEachUse KeepsStaleUsesInItsHeap",
        "test_walks_are_not_kept": "KeepsEachWalk",
        "test_what_has_left_is_forgotten": "KeepsAllGhosts KeepsGhostsOfTheUnused KeepsGhostsOfTheUsed KeepsTheSizesOfAll RaisesOnAKeyThatComesAgain GoesOnWhereItStopped WantsToHaveOfferedIt",
        "test_objects_of_a_request_are_in_from_their_insert_on[store]": "InsertsForgetTheLast InsertsNeedAPlace UsesNeedARequest",
        "test_objects_of_a_request_are_in_from_their_insert_on[lookup]": "KnowsTwoUses",
        "test_objects_leave_for_any_reason[cleared]": "RemovesWhatIsEvictedOnly",
        "test_objects_leave_for_any_reason[evicted]": "RemovesTheCallersKeys",
        "test_asking_what_it_admits_changes_nothing": "AdmitsAndTakesIn AdmitsYesOrNo AdmitsTheKeys AdmitsOneMore",
        "test_a_hint_hides_no_object[keep-keep]": "HidesWhatIsKept",
        "test_a_hint_hides_no_object[done-done]": "OffersWhatIsDoneTwice LosesWhatIsDone",
        "test_a_hint_hides_no_object[keep-]": "KnowsTwoHints",
        "test_a_client_cannot_have_all_that_it_stores_kept": "KeepsAllItIsToldTo",
        "test_requests_are_not_kept_one_by_one": "KeepsEachRequest",
        "test_any_thread_may_call": "HoldsALockOverYield HoldsItsThreadsLockOverYield BelongsToTheThreadOfItsFirstCall",
    },
    "tier_plants_cases.py": {
        "test_a_missing_key_is_an_answer": "AnswersBools AMissRaisesKeyError AMissRaisesFileNotFound TouchOfAMissRaises AnswersAGenerator"
        " AnswersADict AnswersTheNumberOfKeysFound",
        "test_a_value_comes_back_as_it_was_stored[1]": "AnswersTrueForWhatItRead AnswersAStoredValueByFound AnswersFloats RoundsToPages",
        "test_a_value_comes_back_as_it_was_stored[65536]": "CutsAt64K LosesTheLastByteOfPages",
        "test_an_empty_batch_has_no_outcomes": "AnswersNoneForNoKeys",
        "test_the_same_key_twice_is_applied_in_order": "AnswersOneForEachDifferentKey ReadsTheSecondOfTwoOnly",
        "test_a_shorter_value_fills_the_beginning_and_its_length_is_told[99]": "AnswersTheRoom",
        "test_a_peculiar_value_comes_back": "StripsZeros StripsSpaces StripsLineEnds StoresText",
        "test_parts_are_one_value": "ReadsNothingBehindAnEmptyPart NeedsWritableSources",
        "test_many_small_parts_are_one_value": "TakesTheWholeObjectOfAView ReleasesTheCallersViews ReleasesWhatItStored",
        "test_what_was_replaced_by_as_many_bytes_is_replaced": "KeepsTheOlderOfEqualLength",
        "test_storing_again_replaces": "AppendsToTheOlder",
        "test_keys_that_look_alike_are_different": "FoldsTheCaseOfKeys StripsPaddingOfKeys DecodesKeys KeysAreFileNames KeysAreUrls"
        " KeysEndAtZero IgnoresSevenBits",
        "test_every_byte_of_a_key_counts": "IgnoresTheNamespace IgnoresRankAndGroup IgnoresTheLastByte",
        "test_as_many_keys_as_a_request_has_are_looked_up_at_once": "TakesAThousandKeys RaisesOnManyKeys TakesListsOnly",
        "test_outcomes_keep_the_order_of_a_mixed_batch[700]": "SortsTheCallersKeys AnswersInTheOrderOfKeys OneMissSpoilsTheBatch StopsAtTheFirstMiss",
        "test_one_value_that_does_not_fit_is_refused_alone": "RefusesTheWholeBatch CountsRefusedValues",
        "test_nothing_beside_the_parts_is_written[4095]": "WritesBehindThePart FillsTheRoomBehindThePart",
        "test_what_becomes_of_a_buffer_does_not_matter": "ChangesItsSources",
        "test_readers_see_the_value_of_one_writer[150-600]": "PublishesHalfFirst DeletesBeforeItReplaces PublishesInTwoSteps SizesAndBytesApart SharesAScratchBuffer",
        "test_a_new_value_is_seen_whole_or_not_at_all[150-600]": "IndexBeforeValue",
        "test_it_behaves_like_a_dict": "RemembersMisses",
        "test_touching_undoes_no_other_call": "TouchWritesTheValueBack",
        "test_every_value_of_concurrent_writers_is_kept": "LosesConcurrentWrites",
        "test_threads_with_keys_of_their_own_do_not_mix_values": "HasFourConnections",
        "test_a_short_deadline_ends_a_big_batch[get_into-0.001]": "LateGetsOfABatch",
        "test_a_short_deadline_ends_a_big_batch[contains-0.001]": "LateLookupsOfABatch",
        "test_a_short_deadline_ends_a_big_batch[delete-0.001]": "LateDeletesOfABatch",
        "test_a_passed_deadline_fails_at_once[touch]": "TouchHasNoDeadline",
        "test_a_passed_deadline_fails_at_once[usage]": "UsageHasNoDeadline",
        "test_a_passed_deadline_fails_at_once[ping]": "PingIsAlwaysRight",
        "test_a_passed_deadline_fails_at_once[put of no keys]": "AnEmptyPutIsAlwaysRight",
        "test_a_passed_deadline_fails_at_once[put]": "ALateCallKeepsTheLock LateRaisesTimeoutError",
        "test_a_passed_deadline_fails_at_once[get_into]": "TakesTheDeadlineForATimeout",
        "test_a_closed_tier_fails_every_call[touch]": "TouchWorksWhenClosed ClosedRaisesAttributeError",
        "test_a_late_call_does_not_disturb_the_next": "ALateCallKeepsItsConnection",
        "test_what_is_put_beyond_the_capacity_is_refused_or_makes_room": "FullRaisesSqlitesError FullRaisesOsError FullRaisesTheVendorsError"
        " FullRaisesMemoryError FullFailsTheWholeOperation",
        "test_an_empty_value_is_found": "AnEmptyValueRaises",
        "test_usage_follows_what_is_stored_and_deleted": "CountsReplacedValuesTwice CountsEntriesNotBytes CountsInFloats AnswersUsageAsATuple",
        "test_usage_counts_what_was_there_before": "CountsFromZeroAtEachStart",
        "test_usage_is_right_after_concurrent_calls": "CountsWithoutALock CountsMissesOfDelete",
        "test_a_scan_that_rests_holds_nothing": "ScansUnderALock ScansUnderItsThreadsLock ScansInATransaction ListsAList ListsTuples ListsHex",
        "test_it_goes_on_while_values_come_and_go": "PagesByOffset PagesOverlap ListsTemporaryNames",
        "test_it_lists_more_than_one_page": "ListsAHundred",
        "test_it_tells_when_a_value_was_used": "ListsMilliseconds TouchNotesMilliseconds ListsMonotonicTimes ListsTheTimeOfTheScan",
        "test_what_outlives_the_tier_is_listed_again": "ForgetsTimesOfUse",
        "test_a_touched_value_lives_longer": "ATouchMakesItStayForEver TouchesTheFirstOfABatch TouchesShortValuesOnly",
        "test_a_value_that_is_stored_again_lives_longer": "StoringAgainMakesItStayForEver",
        "test_what_expired_is_gone_for_every_call": "ATouchRevives ListsWhatExpired CountsWhatExpired",
        "test_a_value_expires": "AskingProlongs",
        "test_closing_twice_is_closing_once": "CloseHangs CloseRaisesTheSecondTime",
        "test_closing_ends_the_calls_in_flight": "CloseWaitsForCalls",
        "test_closing_gives_files_and_threads_back": "CloseLeavesAThread KeepsADescriptorForEachValue",
        "test_its_capabilities_are_optional_methods": "NamesItsCapabilitiesInAList",
        "test_what_it_claims_to_have_it_has": "ClaimsWhatItDoesNotHave",
        "test_it_has_a_name": "HasNoName",
    },
}

BUGS = [(file, test, bug) for file, tests in KILLED_BY.items() for test, bugs in tests.items() for bug in bugs.split()]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    right = {"eviction_plants_cases.py": "TestSampledLfuPolicy", "codec_plants_cases.py": "TestRightFramedCodec"}
    found: Results = {}
    for chosen in KILLED_BY:
        tests = [f"{file}::Test{bug}::{test}" for file, test, bug in BUGS if file == chosen]
        tests += [f"{file}::{case}" for file, case in right.items() if file == chosen]
        found |= run(tmp_path_factory.mktemp("plants"), *tests)
    return found


@pytest.mark.parametrize(("file", "test", "bug"), BUGS, ids=[f"{file.split('_')[0]}-{bug}" for file, _, bug in BUGS])
def test_a_planted_bug_fails_by_its_promise(results: Results, file: str, test: str, bug: str) -> None:
    name = test.partition("[")[0]
    result = results[bug, name]
    assert result.outcomes & {"failure", "error"}, result
    assert name.removeprefix("test_").replace("_", " ") in result.text or f"{name}" in result.text


@pytest.mark.parametrize("right", ["SampledLfuPolicy", "RightFramedCodec"])
def test_what_is_right_passes(results: Results, right: str) -> None:
    mine = {test: result for (name, test), result in results.items() if name == right}
    assert len(mine) > 15
    for test, result in mine.items():
        assert result.outcomes <= {"passed", "skipped"}, (test, result.text)


def test_every_planted_bug_has_its_test() -> None:
    for file, tests in KILLED_BY.items():
        table = (HERE / file).read_text().partition("\nBUGS")[2].partition("\n}\n")[0]
        assert sorted(re.findall(r'^    "(\w+)":', table, re.MULTILINE)) == sorted(" ".join(tests.values()).split())
