"""What of a tier's `get_into` most tests look at: whether a value came. How long it was, the kit's tests look at."""

from __future__ import annotations

from collections.abc import Sequence

from kvframework.api import Outcome


def outcomes_of(answers: Sequence[int | Outcome]) -> list[Outcome]:
    """FOUND in the place of the bytes that were received."""
    return [each if isinstance(each, Outcome) else Outcome.FOUND for each in answers]
