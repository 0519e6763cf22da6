"""One way's answers beside those of the full computation, from the KV of the documents' prompt. Imports torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Compared:
    """See `AnswerRow`; `tokens` are the way's own answer."""

    same_first: bool
    same: bool
    agreement: float
    first_divergence: float
    divergence: float
    tokens: list[int]


class Answering:
    """Asks over one prompt's KV, again and again: the cache is cut back behind each question. Borrows model and cache.
    `ends` are the tokens that end an answer, `length` the most that it has."""

    def __init__(self, model: Any, cache: Any, ends: frozenset[int], length: int) -> None:
        self._model = model
        self._cache = cache
        self._ends = ends
        self._length = length
        self._tokens = int(cache.get_seq_length())

    def answer(self, question: Sequence[int], begun: Sequence[int] = ()) -> list[int]:
        """Return the greedy answer that goes on with `begun`, with its end if it has one."""
        answer, ids = list(begun), [*question, *begun]
        while len(answer) < self._length and not (answer and answer[-1] in self._ends):
            answer.append(int(self._run(ids, 1)[-1].argmax()))
            ids = answer[-1:]
        self._cut_back()
        return answer

    def scores(self, question: Sequence[int], answer: Sequence[int]) -> torch.Tensor:
        """Return the logarithms of the distributions `[tokens, vocabulary]` from which each token of `answer` would be
        taken, if those before it were said."""
        logits = self._run([*question, *answer[:-1]], len(answer))
        self._cut_back()
        return logits.double().log_softmax(-1)

    def compared(self, question: Sequence[int], answer: Sequence[int], expected: torch.Tensor) -> Compared:
        """Compare with the `answer` of the full computation and its `scores`."""
        found = self.scores(question, answer)
        agrees = found.argmax(-1) == torch.tensor(answer)
        divergence = (expected.exp() * (expected - found)).sum(-1).clamp_min(0)
        same = bool(agrees.all())
        # Up to the first other token both have said the same.
        alike = len(answer) if same else int(agrees.int().argmin())
        return Compared(
            same_first=bool(agrees[0]),
            same=same,
            agreement=float(agrees.double().mean()),
            first_divergence=float(divergence[0]),
            divergence=float(divergence.mean()),
            tokens=list(answer) if same else self.answer(question, answer[:alike]),
        )

    def _run(self, ids: Sequence[int], keep: int) -> torch.Tensor:
        batch = torch.tensor([list(ids)], device=self._model.device)
        logits: torch.Tensor = self._model(
            input_ids=batch, past_key_values=self._cache, use_cache=True, logits_to_keep=keep
        ).logits[0]
        return logits

    def _cut_back(self) -> None:
        self._cache.crop(self._tokens - int(self._cache.get_seq_length()))
