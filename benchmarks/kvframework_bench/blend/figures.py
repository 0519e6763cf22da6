"""The figures of `kvframework bench blend` and their tables."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

import msgspec
from rich.table import Table

from kvframework_bench.console import new_table
from kvframework_bench.rounds import Spread

FULL = "full"


class AnswerRow(msgspec.Struct, frozen=True):
    """One question, asked in one way, beside the full computation. Along the tokens of the full computation's answer:
    `agreement` is the share of those that this way would have said, too, `divergence` the mean Kullback-Leibler
    divergence of the next token's distribution from that of full, `first_divergence` that before the first of them, in
    nats. `same`: the whole answer is that of full; `right`: the way's own answer has the words of the text. `place` is
    that of the answering document in the prompt, from 0."""

    way: str
    question: int
    order: int
    place: int
    same_first: bool
    same: bool
    agreement: float
    first_divergence: float
    divergence: float
    right: bool
    text: str


class WayRow(msgspec.Struct, frozen=True):
    """All questions, asked in one way. `recomputed` is the share of the documents' tokens that went through the model;
    `prefill_s` are processor seconds of the documents' prompt, of one order of them each."""

    way: str
    recomputed: float
    prefill_s: Spread
    same_first: float
    same: float
    agreement: float
    first_divergence: float
    divergence: float
    right: float

    @classmethod
    def of(cls, way: str, recomputed: float, prefill_s: Sequence[float], answers: Sequence[AnswerRow]) -> WayRow:
        """Raises `ValueError` without answers."""
        means = {
            name: fmean(float(getattr(each, name)) for each in answers)
            for name in ("same_first", "same", "agreement", "first_divergence", "divergence", "right")
        }
        return cls(way, recomputed, Spread.of(prefill_s), **means)


class BlendFigures(msgspec.Struct, frozen=True):
    """`prompt_tokens` are those of the documents and what stands around them, without a question; `answers` are cut to
    `answer_tokens`."""

    model: str
    questions: int
    orders: int
    prompt_tokens: int
    answer_tokens: int
    ways: list[WayRow]
    answers: list[AnswerRow]


def blend_tables(figures: BlendFigures) -> list[Table]:
    """Return one table."""
    table = new_table(
        f"{figures.questions} questions, {figures.orders} orders, {figures.prompt_tokens} tokens",
        "recomputed tokens",
        "prefill CPU time, s",
        "ratio to full prefill",
        "first token equal to full",
        "answer equal to full",
        "tokens equal to full",
        "KL divergence, first token",
        "KL divergence, all tokens",
        "right answers",
    )
    full = next(row for row in figures.ways if row.way == FULL)
    for row in figures.ways:
        shares = [f"{share:.0%}" for share in (row.same_first, row.same, row.agreement)]
        table.add_row(
            row.way,
            f"{row.recomputed:.0%}",
            f"{row.prefill_s.median:.2f}",
            f"{row.prefill_s.median / full.prefill_s.median:.2f} x",
            *(["-"] * 5 if row.way == FULL else [*shares, f"{row.first_divergence:.3f}", f"{row.divergence:.3f}"]),
            f"{row.right:.0%}",
        )
    return [table]
