"""The comparison of two documents: their figures by place, the verdicts, and what makes them doubtful."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from kvframework_bench.compare.judgement import THRESHOLD, Verdict, gain, judge
from kvframework_bench.compare.measured import Measured, measured, settings
from kvframework_bench.cuda.figures import CudaFigures
from kvframework_bench.document import FIGURES, Document
from kvframework_bench.errors import Incomparable
from kvframework_bench.machine import Load, Machine

_MOST_BYTES = 16 << 20
_MACHINE = ("cpu", "cores", "memory_bytes")
_SYSTEM = ("kernel", "python")


class Compared(msgspec.Struct, frozen=True):
    """One figure. `gain` above 1: better. `judged` False: of quick runs, or absolute while the machines differ, one was
    busy, or a ratio beside it says it."""

    place: str
    before: float
    after: float
    gain: float
    verdict: Verdict
    judged: bool


class Comparison(msgspec.Struct, frozen=True):
    """`rows` in the order of the documents, `only_before` and `only_after` the places that one of them has.
    `same_machine` as far as the documents tell; `differs` between versions and settings of the system; `doubts` about
    all figures."""

    bench: str
    same_machine: bool
    differs: list[str]
    doubts: list[str]
    rows: list[Compared]
    only_before: list[str]
    only_after: list[str]

    def of(self, verdict: Verdict) -> list[Compared]:
        """Return the judged rows of a verdict, those that changed most first."""
        found = [row for row in self.rows if row.judged and row.verdict == verdict]
        return sorted(found, key=lambda row: max(row.gain, 1 / row.gain), reverse=True)


class _Head(msgspec.Struct, frozen=True):
    bench: str
    quick: bool
    machine: Machine
    load: Load
    figures: msgspec.Raw


def read_document(place: Path) -> Document:
    """Return the document of a file that `--json` wrote. Raises `Incomparable` for anything else."""
    try:
        with place.open("rb") as file:
            text = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise Incomparable(f"cannot be read: {error.strerror or error}", where=str(place)) from None
    if len(text) > _MOST_BYTES:
        raise Incomparable(f"the document is larger than {_MOST_BYTES} bytes", where=str(place))
    try:
        head = msgspec.json.decode(text, type=_Head)
        if head.bench not in FIGURES:
            raise Incomparable(f"{head.bench!r} is not a benchmark", where=str(place), available=", ".join(FIGURES))
        figures: Any = msgspec.json.decode(head.figures, type=FIGURES[head.bench])
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Incomparable(
            f"the file is not a document of this release's `kvframework bench ... --json`: {error}",
            where=str(place),
            hint="measure both builds with this release of kvframework-bench",
        ) from None
    return Document(head.bench, head.quick, head.machine, head.load, figures)


def compare(before: Document, after: Document, *, threshold: float = THRESHOLD) -> Comparison:
    """Compare two documents of one bench. Raises `Incomparable` where they measured different things."""
    if before.bench != after.bench:
        raise Incomparable(f"the documents are of different benchmarks: {before.bench} and {after.bench}")
    if before.quick != after.quick:
        raise Incomparable("only one of the documents is of --quick, which has small sizes and few rounds")
    if (was := settings(before.figures)) != (now := settings(after.figures)):
        differ = [f"{name} {was.get(name)} and {now.get(name)}" for name in was | now if was.get(name) != now.get(name)]
        raise Incomparable(f"the documents were measured with different settings: {'; '.join(differ)}")
    one, other = measured(before.figures), measured(after.figures)
    common = [place for place in one if place in other]
    if not common:
        raise Incomparable(
            "the documents have no figure in common: other shapes, sizes or parts were measured",
            where=f"{next(iter(one), 'none')} of the first document",
            available=f"a figure of the second document, such as {next(iter(other), 'none')}",
        )
    same = _same_machine(before, after)
    # What is judged: the range of two rounds is no noise, and an absolute figure is also one of the machine.
    absolute = same and not before.load.busy and not after.load.busy
    return Comparison(
        bench=before.bench,
        same_machine=same,
        differs=_differences(before.machine, after.machine),
        doubts=_doubts(before, after, same=same),
        rows=[
            _compared(place, one[place], other[place], threshold, full=not before.quick, absolute=absolute)
            for place in common
        ],
        only_before=[place for place in one if place not in other],
        only_after=[place for place in other if place not in one],
    )


def _compared(
    place: str, before: Measured, after: Measured, threshold: float, *, full: bool, absolute: bool
) -> Compared:
    judged = full and before.judged and after.judged and (absolute or before.reading.ratio)
    found = gain(before, after)
    return Compared(place, before.value, after.value, found, judge(before, after, threshold), judged)


def _same_machine(before: Document, after: Document) -> bool:
    same = all(getattr(before.machine, name) == getattr(after.machine, name) for name in _MACHINE)
    if isinstance(before.figures, CudaFigures) and isinstance(after.figures, CudaFigures):
        one, other = before.figures.gpu, after.figures.gpu
        same = same and (one.name, one.memory_bytes, one.link) == (other.name, other.memory_bytes, other.link)
    return same


def _differences(before: Machine, after: Machine) -> list[str]:
    found = {name: (getattr(before, name), getattr(after, name)) for name in (*_MACHINE, *_SYSTEM)}
    for name in {**before.packages, **after.packages}:
        found[name] = (before.packages.get(name, "none"), after.packages.get(name, "none"))
    return [f"{name} {one} -> {other}" for name, (one, other) in found.items() if one != other]


def _doubts(before: Document, after: Document, *, same: bool) -> list[str]:
    found = []
    if not same:
        found.append("the documents are of different machines: only ratios are judged")
    if before.quick:
        found.append("quick runs: too few rounds to judge any figure")
    for name, document in (("first", before), ("second", after)):
        if document.load.busy:
            found.append(f"the machine was busy during the {name} run: only ratios are judged")
    return found
