"""The order of measurements."""

from __future__ import annotations

from kvframework_bench.rounds import Case, interleave


def test_every_round_measures_every_case_and_every_other_one_goes_backwards() -> None:
    order: list[str] = []

    def case(name: str, seconds: float) -> Case:
        def run() -> float:
            order.append(name)
            return seconds

        return run

    steps: list[None] = []
    measured = interleave(
        {"a": case("a", 1.0), "b": case("b", 2.0)}, rounds=3, calls=2, advance=lambda: steps.append(None)
    )
    assert "".join(order) == "aabbbbaaaabb"
    assert measured == {"a": [[1.0, 1.0]] * 3, "b": [[2.0, 2.0]] * 3}
    assert len(steps) == 3
