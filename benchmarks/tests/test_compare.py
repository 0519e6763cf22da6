"""`bench compare`: the judgement for any two figures, the table that says what figures mean, and the command on real
documents."""

from __future__ import annotations

import json
import subprocess
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.tests.test_commands import COMMAND, ENVIRON, bench
from kvframework_bench.compare.judgement import ALONE, THRESHOLD, gain, judge
from kvframework_bench.compare.measured import Measured, measured
from kvframework_bench.compare.readings import LESS, LESS_RATIO, MORE, READINGS
from kvframework_bench.compare.run import compare, read_document
from kvframework_bench.document import FIGURES, Document, Figures
from kvframework_bench.errors import Incomparable
from kvframework_bench.rounds import Latency, Spread

# the judgement

values = st.floats(1e-6, 1e9)


@st.composite
def figures(draw: st.DrawFn) -> Measured:
    """A figure with a range around it, or without one."""
    value = draw(values)
    if draw(st.booleans()):
        return Measured(value, LESS, tail=draw(st.booleans()))
    down, up = draw(st.floats(0.1, 0.999)), draw(st.floats(1.001, 10))
    return Measured(value, LESS, value * down, value * up)


def other(figure: Measured, **changes: Any) -> Measured:
    return msgspec.structs.replace(figure, **changes)


OPPOSITE = {"better": "worse", "worse": "better", "same": "same"}


@given(figures(), figures())
def test_swapping_the_runs_turns_the_verdict_round(one: Measured, two: Measured) -> None:
    two = other(two, tail=one.tail)
    assert judge(two, one) == OPPOSITE[judge(one, two)]


@given(figures(), figures())
def test_more_is_better_or_worse_as_the_reading_says(one: Measured, two: Measured) -> None:
    two = other(two, tail=one.tail)
    more = judge(other(one, reading=MORE), other(two, reading=MORE))
    assert more == OPPOSITE[judge(one, two)]


@given(figures())
def test_a_figure_is_the_same_as_itself(one: Measured) -> None:
    assert judge(one, one) == "same"


@given(figures(), figures(), st.integers(-20, 20))
def test_the_unit_does_not_matter(one: Measured, two: Measured, power: int) -> None:
    def scaled(figure: Measured) -> Measured:
        ends = {name: None if (end := getattr(figure, name)) is None else end * 2.0**power for name in ("low", "high")}
        return other(figure, value=figure.value * 2.0**power, **ends)

    assert judge(scaled(one), scaled(two)) == judge(one, two)


@given(figures(), figures())
def test_within_the_noise_nothing_has_changed(one: Measured, two: Measured) -> None:
    """A median that the other run has also seen, and any difference below the threshold."""
    found = judge(one, two)
    for seen, by in ((one, two), (two, one)):
        if by.low is not None and by.high is not None and by.low <= seen.value <= by.high:
            assert found == "same"
    if max(gain(one, two), 1 / gain(one, two)) < 1 + THRESHOLD:
        assert found == "same"


@given(figures(), st.floats(1.0001, 100))
def test_what_is_worse_stays_worse_when_it_gets_worse_still(one: Measured, factor: float) -> None:
    two = other(one, value=one.value * 1.5, low=one.low and one.low * 1.5, high=one.high and one.high * 1.5)
    three = other(two, value=two.value * factor, low=two.low and two.low * factor, high=two.high and two.high * factor)
    if judge(one, two) == "worse":
        assert judge(one, three) == "worse"


@given(values, st.floats(1.06, 3))
def test_a_change_beyond_narrow_ranges_is_told(value: float, factor: float) -> None:
    one = Measured(value, LESS, value * 0.99, value * 1.01)
    two = Measured(value * factor, LESS, value * factor * 0.99, value * factor * 1.01)
    assert judge(one, two) == "worse"
    alone = judge(Measured(value, LESS), Measured(value * factor, LESS))
    assert alone == ("worse" if factor >= 1 + ALONE else "same")


@pytest.mark.parametrize(("one", "two"), [(0.0, 1.0), (1.0, 0.0), (-0.1, 0.2)])
def test_of_nothing_nothing_is_said(one: float, two: float) -> None:
    assert judge(Measured(one, LESS), Measured(two, LESS)) == "same"


# what figures mean


def structs(kind: Any) -> Iterator[type[msgspec.Struct]]:
    """The structs of figures that a type is made of."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind not in (Spread, Latency):
        yield kind
        for field in msgspec.structs.fields(kind):
            yield from structs(field.type)
    for inner in typing.get_args(kind):
        yield from structs(inner)


def test_of_every_spread_and_latency_it_is_said_what_it_means() -> None:
    found = set(structs(Figures))
    missing = [
        f"{kind.__name__}.{field.name}"
        for kind in found
        for field in msgspec.structs.fields(kind)
        if {Spread, Latency} & {field.type, *typing.get_args(field.type)} and field.name not in READINGS.get(kind, {})
    ]
    assert missing == []
    assert READINGS.keys() <= found
    for kind, readings in READINGS.items():
        assert readings.keys() <= set(kind.__struct_fields__), kind


def test_every_bench_has_its_figures() -> None:
    from kvframework_bench.command import app

    assert {each.name for each in app.registered_commands} - {"compare", "gpu-report"} == FIGURES.keys()
    assert set(FIGURES.values()) == set(typing.get_args(Figures))


def test_rows_are_told_apart_by_what_was_measured() -> None:
    from kvframework_bench.document import Echo, HostFigures, ServerAtRest, Throughput
    from kvframework_bench.server import Resident

    found = measured(
        HostFigures(
            copies=[Throughput("memmove", 8, Spread(1, 2, 3)), Throughput("memmove", 16, Spread(2, 2, 2))],
            copy="memmove",
            echoes=[Echo(64, Latency(1.0, 2.0, 3.0, 10)), Echo(64, Latency(1.0, 2.0, 3.0, 1000))],
            transfers=[],
            server=ServerAtRest(Resident(1, 2, 3), False, Spread(1, 2, 3), 0.5),
        )
    )
    assert list(found) == [
        "copies memmove, nbytes 8: gb_s",
        "copies memmove, nbytes 16: gb_s",
        "echoes nbytes 64: latency p50",
        "echoes nbytes 64: latency p50 #2",
        "echoes nbytes 64: latency p99",
        "server start_s",
        "server idle_cores",
    ]
    assert (found["copies memmove, nbytes 8: gb_s"].low, found["copies memmove, nbytes 16: gb_s"].low) == (1, None)


# documents


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real document, of the command."""
    place = tmp_path_factory.mktemp("compare") / "quick.json"
    place.write_text(bench("lookup", "--quick", "--json").stdout)
    return place


@pytest.fixture
def lookup(quick: Path, tmp_path: Path) -> Path:
    """The same, as if it were of a full run on a machine that did nothing else."""
    return changed(quick, tmp_path / "lookup.json", {"quick": False, "load.busy": False})


def changed(place: Path, to: Path, change: dict[str, Any]) -> Path:
    """The document with other values, by paths such as "machine.cpu"."""
    document = json.loads(place.read_text())
    for path, value in change.items():
        *way, last = path.split(".")
        at = document
        for step in way:
            at = at[int(step)] if isinstance(at, list) else at[step]
        at[last] = value
    to.write_text(json.dumps(document))
    return to


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, "compare", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=ENVIRON, timeout=240, check=False)


def test_a_run_is_the_same_as_itself(lookup: Path) -> None:
    done = run(lookup, lookup, "--fail")
    assert (done.returncode, done.stderr) == (0, "")
    assert "apparently the same machine" in done.stdout
    assert "0 worse, 0 better" in done.stdout


def test_quick_runs_are_compared_and_not_judged(quick: Path, tmp_path: Path) -> None:
    second = tmp_path / "second.json"
    second.write_text(bench("lookup", "--quick", "--json").stdout)
    found = json.loads(run(quick, second, "--json").stdout)
    assert found["only_before"] == found["only_after"] == []
    assert "quick runs: too few rounds to judge any figure" in found["doubts"]
    assert {row["place"] for row in found["rows"]} >= {"requests NOOP, tokens 0: ratio"}
    assert not any(row["judged"] for row in found["rows"])
    assert "0 worse, 0 better, 0 equal" in run(quick, second).stdout
    refused = run(quick, second, "--fail")
    assert refused.returncode == 2
    assert "no figure could be judged for --fail" in refused.stderr


def test_what_got_slower_is_told_and_fails_only_if_asked(lookup: Path, tmp_path: Path) -> None:
    slow = {"min": 90.0, "median": 91.0, "max": 92.0}
    place = changed(lookup, tmp_path / "slow.json", {"figures.requests.0.ratio": slow})
    done = run(lookup, place)
    assert done.returncode == 0
    assert "1 worse" in done.stdout
    (row,) = [line for line in done.stdout.splitlines() if "requests NOOP" in line]
    assert row.split()[-1] == "worse"
    assert run(lookup, place, "--fail").returncode == 1
    assert run(place, lookup, "--fail").returncode == 0
    assert "worse" in run(lookup, place, "--all", "--markdown").stdout


def test_on_another_machine_only_ratios_are_judged(lookup: Path, tmp_path: Path) -> None:
    other_machine = {"machine.cpu": "another", "machine.packages.kvframework": "9.9.9"}
    found = compare(read_document(lookup), read_document(changed(lookup, tmp_path / "other.json", other_machine)))
    assert not found.same_machine
    assert any(each.startswith("cpu ") for each in found.differs)
    assert any(each.endswith("-> 9.9.9") for each in found.differs)
    assert found.doubts[0] == "the documents are of different machines: only ratios are judged"
    judged = {row.place for row in found.rows if row.judged}
    assert judged
    assert all(place.endswith((" ratio", "packed_ratio")) for place in judged)


def test_on_a_busy_machine_only_ratios_are_judged(lookup: Path, tmp_path: Path) -> None:
    busy = read_document(changed(lookup, tmp_path / "busy.json", {"load.busy": True}))
    quiet = read_document(lookup)
    for pair in ((quiet, busy), (busy, quiet)):
        found = compare(*pair)
        assert [each for each in found.doubts if "busy" in each]
        assert {row.place.split()[-1] for row in found.rows if row.judged} == {"ratio", "packed_ratio"}
    assert not compare(quiet, quiet).doubts


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"bench": "host"}, "not a document of this release"),
        ({"bench": "cake"}, "'cake' is not a benchmark"),
        ({"quick": True}, "only one of the documents is of --quick"),
        ({"figures.requests": [], "figures.hashing": []}, "no figure in common"),
        ({"figures.requests": 7}, "not a document of this release"),
        ({"machine": {}}, "not a document of this release"),
    ],
)
def test_what_cannot_be_compared_is_refused(lookup: Path, tmp_path: Path, change: dict[str, Any], match: str) -> None:
    place = changed(lookup, tmp_path / "odd.json", change)
    with pytest.raises(Incomparable, match=match):
        compare(read_document(lookup), read_document(place))


def test_a_file_that_is_none_is_refused_with_its_name(lookup: Path, tmp_path: Path) -> None:
    for text in ("", "{", "[]", "\xff"):
        (tmp_path / "odd.json").write_text(text, encoding="latin-1")
        with pytest.raises(Incomparable, match=r"odd\.json"):
            read_document(tmp_path / "odd.json")
    done = run(lookup, tmp_path / "none.json")
    assert done.returncode == 2
    assert "[bench.incomparable]" in done.stderr
    assert "none.json" in done.stderr


def test_rows_of_one_run_only_are_named_and_not_compared(lookup: Path, tmp_path: Path) -> None:
    document = read_document(lookup)
    fewer: Document = msgspec.structs.replace(document, figures=msgspec.structs.replace(document.figures, hashing=[]))
    found = compare(document, fewer)
    assert found.only_after == []
    assert all(place.startswith("hashing ") for place in found.only_before)
    assert all(place.startswith("requests ") for place in (row.place for row in found.rows))


def test_different_settings_are_refused() -> None:
    from kvframework_bench.document import StoreFigures
    from kvframework_bench.machine import Load, describe_machine

    one = Document("store", False, describe_machine(), Load.of(0.0, 0.0, 0.0), StoreFigures("arena", "shuffled", []))
    two = msgspec.structs.replace(one, figures=StoreFigures("wire", "shuffled", []))
    with pytest.raises(Incomparable, match="path arena and wire"):
        compare(one, two)


def test_a_ratio_stands_for_the_absolute_figure_beside_it() -> None:
    from kvframework_bench.document import HashFigures

    latency = Latency(1.0, 2.0, 3.0, 10)
    found = measured(HashFigures(256, "sha256", latency, Spread(1, 2, 3), latency, None))
    assert {name: (each.judged, each.reading) for name, each in found.items()} == {
        "latency p50": (False, LESS),
        "ratio": (True, LESS_RATIO),
        "packed p50": (False, LESS),
    }
    assert all(each.judged for each in measured(HashFigures(256, "h", latency, None, latency, None)).values())
