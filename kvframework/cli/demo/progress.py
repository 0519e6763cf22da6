"""How far the computation of a prompt is, and how long the rest will take. Pure."""

from __future__ import annotations


class Progress:
    """`first` tokens of `total` are there at the time `began`. The rest is estimated from the latest piece; the work
    for a token grows with its position, so the estimate is rather high than low."""

    def __init__(self, first: int, total: int, began: float) -> None:
        self._done = first
        self._total = total
        self._at = began

    def at(self, done: int, now: float) -> str:
        """Return the text for a moment at which `done` tokens are there."""
        text = f"{done} of {self._total} tokens"
        if self._done < done < self._total:
            per_token = (now - self._at) / (done - self._done)
            middle, ahead = (self._done + done) / 2, (done + self._total) / 2
            left_s = per_token * (self._total - done) * ahead / middle
            text += f", about {_duration(left_s)} left"
        self._done, self._at = done, now
        return text


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
