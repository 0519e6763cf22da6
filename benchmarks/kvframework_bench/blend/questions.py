"""Four texts, the questions about them, and in which order of the texts each is asked. Pure."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from pathlib import Path

import msgspec

_HERE = Path(__file__).parent
# In the public domain: Carroll 1865, Lincoln 1863, Aesop as Townsend translated him in 1867, the Bill of Rights 1789.
DOCUMENTS = ("aesop", "alice", "gettysburg", "rights")


class Question(msgspec.Struct, frozen=True):
    """A question, the document that answers it, and words of that document which a right answer has, in lower case."""

    document: str
    question: str
    answer: str

    def answered_by(self, text: str) -> bool:
        """Return whether a text has the words, in any case and spacing."""
        return self.answer in " ".join(text.lower().split())


class Order(msgspec.Struct, frozen=True):
    """One order of the documents, and the numbers of the questions that are asked over it."""

    documents: tuple[str, ...]
    questions: tuple[int, ...]


def questions() -> list[Question]:
    return msgspec.json.decode((_HERE / "questions.json").read_bytes(), type=list[Question])


def document(name: str) -> str:
    return (_HERE / "texts" / f"{name}.txt").read_text(encoding="utf-8")


def orders(asked: Sequence[Question], count: int, seed: int) -> list[Order]:
    """Deal the questions, shuffled, to `count` different orders of the documents, at most all that there are."""
    chance = random.Random(seed)
    chosen = chance.sample(list(itertools.permutations(DOCUMENTS)), count)
    numbers = chance.sample(range(len(asked)), len(asked))
    return [Order(each, tuple(numbers[at::count])) for at, each in enumerate(chosen)]
