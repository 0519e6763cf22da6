"""Each of many planted bugs fails a test of its kit, which is named by the promise that the bug breaks.

The bugs are in the files `*_cases.py`, a line each; here stands the test that is there for each, and what it says of some.
"""
# ruff: noqa: E501  a line a test

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from tests.dev.kits.kit_run import HERE, Results, run

# The runs of all bugs of a kit are one run.
pytestmark = pytest.mark.timeout(1800)

# By file, a test a line: the bugs that it finds, and what the failure says of some.
KILLED_BY = {
    "codec_cases.py": """
test_every_kind_of_damage_is_noticed[noise]: SumsTheBeginning SumOf8Bits NoSum SumsTheLength SumsEverySecondByte
test_every_kind_of_damage_is_noticed[text]: SumsTheEnds AddsUp XorsBytes
test_another_length_is_refused[text]: ChecksNoSum
test_a_claim_takes_no_memory: BelievesTheHeader BelievesTheHeaderUpToALimit BelievesABigEndianHeader
test_a_small_place_takes_little_memory: ReservesTwentyTimesThePlace UnpacksBombs (bytes to refuse 1000)
test_what_is_more_than_was_packed_is_refused[text]: DropsZerosBehind DropsALineEnd SearchesItsMagic
test_what_is_cut_off_is_refused[text]: RaisesRuntimeError IgnoresAShortHeader FillsWithZeros RaisesEofError RaisesStructError RaisesIndexError
test_what_is_packed_is_unpacked[text]: ItsOwnMagicIsPacked
test_what_is_packed_is_unpacked[runs]: RunsOf256
test_what_is_packed_is_unpacked[every pair]: ThroughFloats
test_what_is_packed_is_unpacked: LosesAnOddByte LosesAWholeLastBlock LosesTheTailOfWords TakesWholeWordsOnly AnswersBytes AnswersOneView AnswersNone AnswersAGenerator (not an iterator) AnswersWords (itemsize) WritesBesideThePlace (outside the buffer given to) AddsToWhatIsInThePlace
test_elements_of_any_dtype_come_back: CannotPackNothing RemembersByLength AnswersTwoDimensions AnswersEverySecondByte
test_elements_of_any_dtype_come_back[float16]: TakesWholeElementsOnly BelievesTheDtype
test_elements_of_any_dtype_come_back[a dtype of later releases]: KnowsTodaysDtypesOnly
test_memory_may_begin_at_any_address[noise]: ReadsFromAlignedAddresses TurnsFromAlignedAddressesOn WritesWholeWords ClearsBeforeThePlace
test_memory_is_let_go_when_a_call_has_ended[damaged]: KeepsTheError
test_it_keeps_nothing_of_its_calls: KeepsAllPackedBytes KeepsAThreadForEach
test_objects_that_differ_in_one_byte_are_different: RemembersByBothEnds RemembersByAddress
test_a_batch_is_packed_before_it_is_sent: AnswersTheSameList PacksAllIntoOneBuffer (changed the packed bytes)
test_a_call_is_not_disturbed_at_any_step: PacksInPlaceAndRestores KeepsTheSizeInItself SharesAScratchBuffer (bytes) KeepsTheBytesForAnInstant
test_any_memory_is_packed_and_left_as_it_is[mapping]: WritesToTheObject
test_its_name_fits_into_an_envelope: ANameThatFitsNowhere (must have at most)
test_another_length_is_refused: StripsZeros (must raise ValueError) FillsWhatItCan (must raise ValueError)
test_any_size_comes_back: LossyFromAMebibyteOn LosesWhatIsBehind64K (unpacked wrong bytes)
test_a_call_knows_nothing_of_others: KeepsADictionary (not known)
test_what_another_process_packed_is_unpacked: PacksByPythonsHash (ValueError)
test_what_is_cut_off_is_refused: RaisesItsOwnError (zlib.error) TakesWhatIsCutOff (packed bytes)
test_what_is_more_than_was_packed_is_refused: TakesWhatComesBehind (bytes more at the end)
test_every_kind_of_damage_is_noticed: BelievesTheBytes (unpacked damaged bytes)
test_any_memory_is_packed_and_left_as_it_is: ShufflesInPlace (belongs to the caller) NeedsWritableMemory (not writable)
test_memory_is_let_go_when_a_call_has_ended: KeepsTheObject (BufferError) KeepsThePlace (BufferError) KeepsWhatFailed (BufferError)
""",
    "eviction_cases.py": """
test_all_that_is_in_is_offered_once: HoldsAThousand OffersAThousand RecursesForEach ManyTakesListsOnly KnowsTheDigestOfTheKey KnowsTheEndOfTheKey GoesByTheDigestAlone (does not offer) HidesTheNewest HidesTheOldest HidesWhatWasJustUsed HidesWhatIsYoung NeverEnds SkipsWhatItOfferedBefore ForgetsAtTheSecondUse LosesTheLastOfItsList RemovesTheHeadWhateverLeaves AnswersAList OffersHex OffersViews OffersPairs KnowsAShortHash OffersTheUsedTwice (offers a key twice) HidesTheHot (does not offer) OffersWhatLeft (does not hold) OfferingIsRemoving (does not offer)
test_it_behaves_like_a_set: SharesADefault SharesItsQueue InsertsForgetTheLast InsertsNeedAPlace UsesNeedARequest KnowsTwoUses RemovesWhatIsEvictedOnly RemovesTheCallersKeys AdmitsAndTakesIn AdmitsYesOrNo (not a number from 0) AdmitsTheKeys (not a number from 0) AdmitsOneMore (not a number from 0) HidesWhatIsKept OffersWhatIsDoneTwice LosesWhatIsDone KnowsTwoHints EntersGhostsTwice RaisesOnAnEmptyWalk HidesTheLarge HidesTheTiny SizesOf32Bits LosesCountOfBytes (does not offer) RemembersRemovedKeysAsIn (does not offer) GoesByIdentity (KeyError)
test_a_call_of_a_large_policy_is_as_quick: CopiesAllForAWalk SortsNumbers AddsUpAllBytes LooksForTheLeast CopiesAtEachUse HeapifiesEachBatch CountsAllBehindTheFirst Sleeps SleepsInAWalk PutsBackWhenTheWalkEnds SearchesOnUse (on_access_many: ) SortsForEachVictim (victims: ) SearchesOnRemoval (on_remove: ) TidiesUpOnEachInsert
test_an_object_may_be_used_very_often: CountsUsesInAByte CountsUsesIn16Bits
test_many_accesses_at_once_are_as_many_one_by_one[40]: ManyForgetsTheLast ManyBackwards ManyEachOnce ManyIsNothing ManySortsTheCallersList ManyEmptiesTheCallersList
test_many_accesses_at_once_are_as_many_one_by_one[8192]: ManyTakesTheFirstThousand ManyTakesEach8191
test_requests_and_walks_are_not_kept_one_by_one: KeepsEachRequest KeepsEachUse KeepsStaleUsesInItsHeap KeepsEachWalk
test_what_has_left_is_forgotten: KeepsAllGhosts KeepsGhostsOfTheUnused KeepsGhostsOfTheUsed KeepsTheSizesOfAll RaisesOnAKeyThatComesAgain GoesOnWhereItStopped WantsToHaveOfferedIt NeverForgets (6000 objects that were inserted)
test_a_client_cannot_have_all_that_it_stores_kept: KeepsAllItIsToldTo
test_any_thread_may_call: HoldsALockOverYield HoldsItsThreadsLockOverYield BelongsToTheThreadOfItsFirstCall KnowsOneThread (KeyError)
""",
    "tier_cases.py": """
test_a_value_comes_back_as_it_was_stored[1]: AnswersBools AMissRaisesKeyError AMissRaisesFileNotFound TouchOfAMissRaises AnswersAGenerator RaisesOnAMiss (no such key) ReleasesTheCallersViews SaysDeletedOfAnything (DELETED) FailsShorterValues (FAILED) AskingMakesValues AnswersTrueForWhatItRead AnswersAStoredValueByFound AnswersFloats RoundsToPages
test_a_value_comes_back_as_it_was_stored[65536]: KeepsTheOlderOfEqualLength CutsAt64K LosesTheLastByteOfPages
test_it_behaves_like_a_dict: ClaimsScan (cannot list) ListsNothing (does not list) ListsTheDeleted (lists a deleted value) ListsOtherSizes (lists a value of) KeepsWhatWasSpoilt NeverReplaces AnswersNoneForNoKeys AnswersOneForEachDifferentKey ReadsTheSecondOfTwoOnly TheFirstOfTwoWins AnswersTheRoom AppendsToTheOlder RemembersMisses ReordersOutcomes DropsEmptyValues CutsLongerValues AskingForgets LiesOnDelete TellsTheLengthOfTheBuffer OneLongerValueSpoilsTheBatch (FAILED) TouchMakesValues (FOUND) RemembersWhatTheOtherDeleted (FOUND)
test_a_value_comes_back_as_it_was_stored: StripsZeros StripsSpaces StripsLineEnds StoresText ReleasesWhatItStored
test_parts_are_one_value: TakesTheWholeObjectOfAView ReadsNothingBehindAnEmptyPart NeedsWritableSources ReadsOnlyTheFirstPart (returned 1 bytes)
test_it_goes_on_while_values_come_and_go: ListsAHundred ListsOnePage (does not list) PagesByOffset PagesOverlap ListsTemporaryNames ListsWhatMoves (changed size)
test_different_keys_are_different: FoldsTheCaseOfKeys StripsPaddingOfKeys DecodesKeys KeysAreFileNames KeysEndAtZero IgnoresSevenBits IgnoresTheNamespace IgnoresRankAndGroup IgnoresTheLastByte SharesStateBetweenKeys (FOUND)
test_as_many_keys_as_a_request_has_are_looked_up_at_once: TakesAThousandKeys RaisesOnManyKeys TakesListsOnly
test_outcomes_keep_the_order_of_a_mixed_batch[700]: SortsTheCallersKeys AnswersInTheOrderOfKeys OneMissSpoilsTheBatch StopsAtTheFirstMiss
test_one_value_that_does_not_fit_is_refused_alone: RefusesTheWholeBatch CountsRefusedValues
test_nothing_beside_the_parts_is_written[0]: AnEmptyValueRaises
test_nothing_beside_the_parts_is_written[4095]: WritesBehindThePart FillsTheRoomBehindThePart
test_readers_see_the_whole_value_of_one_writer[150-600]: IndexBeforeValue PublishesHalfFirst DeletesBeforeItReplaces PublishesInTwoSteps SizesAndBytesApart SharesAScratchBuffer
test_touching_undoes_no_other_call: TouchWritesTheValueBack
test_threads_with_keys_of_their_own_do_not_mix_values: HasFourConnections LosesConcurrentWrites
test_a_short_deadline_ends_a_big_batch[get_into-0.001]: LateGetsOfABatch
test_a_short_deadline_ends_a_big_batch[contains-0.001]: LateLookupsOfABatch
test_a_short_deadline_ends_a_big_batch[delete-0.001]: LateDeletesOfABatch
test_a_passed_deadline_fails_at_once[touch]: TouchHasNoDeadline
test_a_passed_deadline_fails_at_once[usage]: UsageHasNoDeadline
test_a_passed_deadline_fails_at_once[ping]: PingIsAlwaysRight
test_a_passed_deadline_fails_at_once[put of no keys]: AnEmptyPutIsAlwaysRight
test_a_passed_deadline_fails_at_once[put]: ALateCallKeepsTheLock LateRaisesTimeoutError
test_a_passed_deadline_fails_at_once[get_into]: TakesTheDeadlineForATimeout
test_a_closed_tier_fails_every_call[touch]: TouchWorksWhenClosed ClosedRaisesAttributeError
test_a_late_call_does_not_disturb_the_next: ALateCallKeepsItsConnection
test_what_is_put_beyond_the_capacity_is_refused_or_makes_room: FullRaisesSqlitesError FullRaisesOsError FullRaisesTheVendorsError FullRaisesMemoryError FullFailsTheWholeOperation CannotReplaceWhenFull (must replace a value) SaysStoredWhenFull (is missing) KnowsNoLimit (<= capacity)
test_usage_follows_what_is_stored_and_deleted: CountsReplacedValuesTwice CountsEntriesNotBytes CountsInFloats ClaimsUsage (does not know its capacity) CountsNothing (rose from) CountsTheDeleted (fell from)
test_usage_is_right_after_concurrent_calls: CountsWithoutALock CountsMissesOfDelete
test_a_scan_that_rests_holds_nothing: ScansUnderALock ScansUnderItsThreadsLock ScansInATransaction ListsAList ListsTuples
test_it_tells_when_a_value_was_used: ListsMilliseconds TouchNotesMilliseconds ListsMonotonicTimes ListsTheTimeOfTheScan TouchingIsNoUse (did not change used_at)
test_a_value_that_is_used_lives_longer[touch]: ATouchMakesItStayForEver TouchesTheFirstOfABatch TouchesShortValuesOnly TouchDoesNotProlong (did not prolong their life)
test_a_value_that_is_used_lives_longer[put]: StoringAgainMakesItStayForEver StoringDoesNotProlong (did not prolong their life)
test_a_value_expires: ATouchRevives ListsWhatExpired CountsWhatExpired AskingProlongs ClaimsTtl (did not expire)
test_closing_twice_is_closing_once: CloseHangs CloseRaisesTheSecondTime ClosesOnlyOnce (closed already)
test_closing_ends_the_calls_in_flight[get_into]: CloseWaitsForCalls GoesOnWhenClosed (went on after close) UnmapsUnderACall (mmap closed)
test_closing_gives_files_and_threads_back: CloseLeavesAThread KeepsADescriptorForEachValue LeaksAFile (/dev/null) LeaksAThread (forgotten) LeaksAFileWithoutReopen (/dev/null)
test_its_capabilities_are_optional_methods: NamesItsCapabilitiesInAList ClaimsTheUnknown (unknown names: speed)
test_it_has_a_name: HasNoName
test_outcomes_keep_the_order_of_a_mixed_batch: ReordersOutcomes
test_a_passed_deadline_fails_at_once: IgnoresTheDeadline (it must raise TierError)
test_a_short_deadline_ends_a_big_batch: LooksAtTheDeadlineOnce (after its deadline)
test_no_call_waits_for_a_put_beyond_its_deadline[put-first]: LocksWithoutATimeout (after its deadline)
test_no_call_waits_for_a_put_beyond_its_deadline[put-second]: LocksTheStoreWithoutATimeout (after its deadline)
test_no_call_waits_for_a_put_beyond_its_deadline[delete-first]: DeletesBehindAPut (after its deadline)
test_damage_below_the_tier_is_no_miss: ASpoiltValueIsAMiss (must return DAMAGED or FAILED)
test_a_second_opener_damages_nothing: TheSecondTidiesUp (took a value from the first)
test_readers_see_the_whole_value_of_one_writer: MixesConcurrentValues (bytes of several values) PutsInTwoSteps (a wrong length of a value) DeletesInTwoSteps (a wrong length of a value)
test_one_value_is_deleted_once: DeletesTwice (exactly one)
test_a_value_comes_back_as_it_was_stored: TellsTheLengthThatWasStored (other bytes) TellsThatItFound (FOUND) AskingForgets (MISSING)
test_memory_stays_the_callers: RetainsABuffer (The tier keeps a reference) ChangesItsSources (changed the caller's bytes) KeepsMemory (The tier keeps a reference) KeepsMemoryOfFailedCalls (The tier keeps a reference)
test_a_closed_tier_fails_every_call: AnswersWhenClosed (the tier is closed) RaisesAnotherError (ConnectionError)
test_values_outlive_the_tier: CountsFromZeroAtEachStart ForgetsTimesOfUse ForgetsWhenClosed (MISSING)
test_each_sees_what_the_other_does: ClaimsSharing (MISSING) ClaimsSharingWithoutProof (define `reopen)
test_two_at_work_on_the_same_keys_see_whole_values: MixesValuesOfTwo (bytes of several values)
test_what_is_replaced_and_deleted_leaves_nothing_behind: LeaksWhatAShorterValueReplaces (No room for) LeaksAPieceOfTheDeletedUncounted (No room for)
""",
    "async_cases.py": """
test_without_an_event_it_comes_after_the_threads_current_stream: IgnoresTheCurrentStream (before the work that was queued)
test_what_is_no_event_is_not_taken_for_none: TakesAnythingForNone (An object that is not an event was accepted)
test_what_was_lent_is_let_go: KeepsTensors (refers to tensors) KeepsPlans (refers to plans) KeepsTheArena (the arena)
test_it_registers_only_where_it_can_move_bytes: RegistersAnywhere (must raise TransportMismatch)
test_a_load_does_not_wait_for_a_store_that_stands_still: HasOneStream (A load waited for a store)
test_nothing_is_answered_while_a_copy_stands_still[hybrid]: WaitsForTheLastStreamOnly (it still touches blocks)
test_close_waits_for_a_copy_under_way: ClosesAtOnce (`close` returned, or the transfer ended)
test_a_device_reset_is_a_miss_and_then_all_works: GivesUpAfterAReset (a store after the reset of the device)
""",
    "wire_cases.py": """
test_what_a_stalled_wire_held_back_is_no_answer_to_the_next_call: KeepsALateConnection (b'one')
test_a_fault_on_the_wire_is_an_outcome_or_a_tier_error[stall]: WaitsForever (A call did not return)
test_a_fault_on_the_wire_is_an_outcome_or_a_tier_error[reset]: RaisesWhatTheSocketDoes (whatever it was)
test_a_fault_on_the_wire_is_an_outcome_or_a_tier_error[refuse]: NeverConnectsAgain (Bad file descriptor)
test_closing_ends_the_calls_that_wait_for_a_stalled_wire[get_into]: LeavesItsCallsAtClose (close)
test_failures_use_nothing_up: LeavesBrokenConnections (broken connections)
""",
    "engine_driven_cases.py": """
test_ranges_are_written_before_they_are_published: CommitsFirst (had published them)
test_a_copy_in_the_engine_that_fails_is_one_miss[store]: PublishesWhatFailed (A store whose copy failed was answered as a success) KeepsItsRanges (to release its ranges and pins)
test_a_copy_in_the_engine_that_fails_is_one_miss[load]: AnswersAHit (A load whose copy failed was answered as a success)
test_an_answer_that_comes_late[store-is used]: ThrowsLateAnswersAway (before the server's late answer)
test_an_answer_that_comes_late[load-is given back]: KeepsLateAnswers (to release its ranges and pins)
test_tensors_are_those_of_the_submit: RemembersTheTensors (A transfer with other tensors than the first)
test_the_wire_carries_the_same_as_the_arena[nhd]: LoadsHalfOfTheWire (24 chunks over the wire)
test_buffers_stay_as_they_are_until_they_are_answered: StagesInOnePlace (before the server had answered)
test_buffers_are_never_written_again_after_a_failure: WritesAgainAfterAFailure (buffers of an unanswered store were reused)
test_blocks_that_the_tensors_of_a_submit_lack_are_refused: TakesAnyBlock (must raise BadBlockIds)
test_close_gives_threads_and_files_back[wire]: LeavesItsThread (left open: thread)
""",
}
BUGS = [
    (file, test, bug, says)
    for file, table in KILLED_BY.items()
    for test, bugs in (line.split(": ", 1) for line in table.strip().splitlines())
    for bug, says in re.findall(r"(\w+)(?: \((.*?)\))?", bugs)
]
RIGHT = {
    "codec_cases.py": ["RightFramedCodec"],
    "eviction_cases.py": ["RightPolicy", "SampledLfuPolicy"],
    "wire_cases.py": ["OverTcp"],
}
NOTHING_GIVEN = {
    ("codec_cases.py", "NoCodec", "test_its_name_fits_into_an_envelope"): "make_codec",
    ("eviction_cases.py", "NoPolicy", "test_it_has_the_plugins_name"): "make_policy",
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Results]:
    known: dict[str, Results] = {}

    def of(file: str) -> Results:
        if file not in known:
            tests = [f"{file}::Test{bug}::{test}" for each, test, bug, _ in BUGS if each == file]
            tests += [f"{file}::Test{right}" for right in RIGHT.get(file, ())]
            tests += [f"{file}::Test{case}::{test}" for each, case, test in NOTHING_GIVEN if each == file]
            known[file] = run(tmp_path_factory.mktemp("planted"), *tests)
        return known[file]

    return of


@pytest.mark.parametrize(
    ("file", "test", "bug", "says"),
    [pytest.param(*each, marks=[pytest.mark.torch] * each[0].startswith("engine")) for each in BUGS],
    ids=[f"{file.removesuffix('_cases.py')}-{bug}" for file, _, bug, _ in BUGS],
)
def test_a_planted_bug_fails_its_test(
    results: Callable[[str], Results], file: str, test: str, bug: str, says: str
) -> None:
    name = test.partition("[")[0]
    result = results(file)[bug, name]
    assert result.outcomes & {"failure", "error"}, result
    assert says in result.text


@pytest.mark.parametrize(("file", "right"), [(file, each) for file, rights in RIGHT.items() for each in rights])
def test_what_is_right_passes(results: Callable[[str], Results], file: str, right: str) -> None:
    mine = {test: result for (name, test), result in results(file).items() if name == right}
    assert {test.partition("[")[0] for each, test, _, _ in BUGS if each == file} <= mine.keys()
    for test, result in mine.items():
        assert result.outcomes <= {"passed", "skipped"}, (test, result.text)


@pytest.mark.parametrize(("file", "case", "test"), NOTHING_GIVEN)
def test_what_is_not_given_is_told(results: Callable[[str], Results], file: str, case: str, test: str) -> None:
    result = results(file)[case, test]
    assert result.outcomes == {"error"}
    assert f"Set `use`, the plugin's name, or define a fixture `{NOTHING_GIVEN[file, case, test]}`" in result.text


@pytest.mark.parametrize("file", sorted(KILLED_BY.keys() - {"wire_cases.py"}))
def test_every_planted_bug_has_its_test(file: str) -> None:
    table = (HERE / file).read_text().partition("\nBUGS")[2].partition("\n}\n")[0]
    planted = re.findall(r'^    "(\w+)":', table, re.MULTILINE)
    assert len(planted) == len(set(planted))
    assert set(planted) == {bug for each, _, bug, _ in BUGS if each == file}
