"""The page of plots: it shows what is measured, and its figures are those that the other pages print."""

from __future__ import annotations

import re

from tests.docs.prose import ROOT

PAGE = (ROOT / "docs" / "plots.md").read_text(encoding="utf-8")
PRINTED = "\n".join(
    (ROOT / page).read_text(encoding="utf-8")
    for page in ("docs/benchmarks.md", "docs/benchmarks_method.md", "plugins/engines/blend/README.md")
)
FIGURE = re.compile(r"\b\d[\d.]* (?:ms|µs|s|x|%)(?=[\s.,;)])")


def numbers(text: str) -> set[float]:
    return {float(number.replace(",", "")) for number in re.findall(r"\d[\d,]*(?:\.\d+)?", text)}


def test_every_figure_of_the_page_is_printed_where_it_was_measured() -> None:
    figures = FIGURE.findall(PAGE)
    assert len(figures) > 20
    printed = numbers(PRINTED)
    assert [each for each in figures if float(each.split()[0]) not in printed] == []


def test_every_plot_is_shown_and_legible_on_a_dark_page() -> None:
    drawn = sorted(path.name for path in (ROOT / "docs").glob("*.svg") if path.name != "architecture.svg")
    assert sorted(re.findall(r"\]\(([\w-]+\.svg)\)", PAGE)) == drawn
    for name in drawn:
        assert "prefers-color-scheme: dark" in (ROOT / "docs" / name).read_text(encoding="utf-8")
