"""The bench of blend: its questions have their answers in the texts, and its comparison finds what differs."""

from __future__ import annotations

import importlib.util
import subprocess

import pytest

from benchmarks.tests.test_commands import COMMAND, ENVIRON, SPREAD, document
from kvframework_bench.blend.questions import DOCUMENTS, Question, orders, questions
from kvframework_bench.blend.questions import document as text_of

ASKED = questions()
needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers not installed"
)


def test_every_text_has_questions_and_none_is_asked_twice() -> None:
    assert len(ASKED) == len({each.question for each in ASKED}) == 50
    counts = [sum(each.document == name for each in ASKED) for name in DOCUMENTS]
    assert sum(counts) == 50
    assert min(counts) >= 12


@pytest.mark.parametrize("asked", ASKED, ids=lambda asked: asked.question)
def test_the_answer_stands_in_its_text_and_not_in_the_question(asked: Question) -> None:
    assert asked.answered_by(text_of(asked.document))
    assert not asked.answered_by(asked.question)


def test_questions_are_dealt_once_to_orders_that_differ() -> None:
    dealt = orders(ASKED, 7, 1)
    assert sorted(number for order in dealt for number in order.questions) == list(range(50))
    assert len({order.documents for order in dealt}) == 7
    assert all(sorted(order.documents) == list(DOCUMENTS) for order in dealt)
    assert {len(order.questions) for order in dealt} == {7, 8}
    assert orders(ASKED, 7, 1) == dealt != orders(ASKED, 7, 2)


@pytest.mark.torch
@needs_transformers
def test_the_figures_of_blend() -> None:
    figures = document("blend", "--model", "random", "--share", "0.15", "--share", "1")
    full, blended, whole, naive = figures["ways"]
    assert [row["way"] for row in figures["ways"]] == ["full", "blend 15%", "blend 100%", "naive"]
    assert [row["recomputed"] for row in (full, whole, naive)] == [1.0, 1.0, 0.0]
    assert blended["recomputed"] == pytest.approx(0.15, abs=0.001)
    assert all(set(row["prefill_s"]) == SPREAD for row in figures["ways"])
    # All of it computed again is the full computation; as it is, it is far from that.
    for row in (full, whole):
        assert (row["same_first"], row["same"], row["agreement"]) == (1.0, 1.0, 1.0)
        assert row["divergence"] < 1e-6
    assert 1e-6 < 3 * blended["divergence"] < naive["divergence"]
    assert len(figures["answers"]) == 4 * figures["questions"]
    assert {each["place"] for each in figures["answers"]} <= {0, 1, 2, 3}


@pytest.mark.torch
@needs_transformers
def test_an_answer_is_compared_along_the_tokens_of_full() -> None:
    import torch

    from kvf_transformers.demo_model import random_llama
    from kvf_transformers.forward import Forward
    from kvframework_bench.blend.answering import Answering
    from transformers import DynamicCache

    _, model, _ = random_llama("tiny")
    prompt, question = list(range(40)), [65, 66]
    with torch.no_grad():
        sides = []
        for tokens in (prompt, prompt[::-1]):
            cache = DynamicCache()
            Forward(model).compute(tokens, cache)
            sides.append(Answering(model, cache, frozenset(), 6))
        full, other = sides
        answer = full.answer(question)
        assert answer == full.answer(question), "the cache is cut back"
        expected = full.scores(question, answer)
        assert expected.shape == (6, model.config.vocab_size)
        assert expected.argmax(-1).tolist() == answer
        own = full.compared(question, answer, expected)
        assert (own.same, own.agreement, own.divergence, own.tokens) == (True, 1.0, 0.0, answer)
        found = other.compared(question, answer, expected)
        assert not found.same
        assert found.divergence > 0.01
        assert found.tokens == other.answer(question) != answer
        ended = Answering(model, cache, frozenset(found.tokens[1:2]), 6)
        assert ended.answer(question) == found.tokens[:2]


@pytest.mark.torch
@needs_transformers
def test_a_model_that_is_not_there_is_refused() -> None:
    done = subprocess.run(
        [*COMMAND, "blend", "--model", "/nowhere"], capture_output=True, text=True, env=ENVIRON, check=False
    )
    assert done.returncode == 2
    assert "/nowhere: unknown model" in done.stderr
    assert "Traceback" not in done.stderr
