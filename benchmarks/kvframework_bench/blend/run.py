"""The measurement: questions over documents whose KV was computed in advance, in every way, at a real server. Imports
torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import torch

from kvf_blend.engine.blend import BlendTransformers
from kvf_blend.engine.placing import Loaded
from kvf_demo.models import chosen_model
from kvf_transformers.demo_model import DemoModel, Dialogue, dialogue_of, encode, end_tokens, local_model
from kvf_transformers.forward import Forward
from kvframework_bench.blend.answering import Answering
from kvframework_bench.blend.figures import FULL as FULL_WAY
from kvframework_bench.blend.figures import AnswerRow, BlendFigures, WayRow
from kvframework_bench.blend.local_llama import local_llama
from kvframework_bench.blend.questions import DOCUMENTS, Order, Question, document, orders, questions
from kvframework_bench.console import Stage, no_progress
from kvframework_bench.errors import BenchFailed
from kvframework_bench.process import scratch
from kvframework_bench.server import PATIENT, running_server
from transformers import DynamicCache

_BLEND, _ALONE, _NAIVE = "blend", "alone", "naive"
_CAPACITY = 1 << 30
_BLENDING = ["requests.0.use=blend"]


class BlendSizes(msgspec.Struct, frozen=True):
    """`questions` of all that there are, over `orders` orders of the documents, answered by `answer_tokens` at most.
    `shares` of the documents' tokens are computed again, of documents that were computed behind what begins the prompt,
    and of those that were computed alone."""

    questions: int
    orders: int
    answer_tokens: int
    shares: tuple[float, ...] = (0.0, 0.05, 0.15, 0.3)
    seed: int = 1


FULL = BlendSizes(50, 10, 16)
QUICK = BlendSizes(2, 1, 4, (0.0, 0.15))


@dataclass(frozen=True)
class _Prompt:
    """The documents in one order, with what stands before and behind them up to a question."""

    tokens: list[int]
    ranges: list[tuple[int, int]]


@dataclass
class _Way:
    """One way to the KV of a prompt."""

    cache: Any
    seconds: float
    recomputed: float


def bench_blend(sizes: BlendSizes, *, model: str, stage: Stage = no_progress) -> BlendFigures:
    """Measure; takes some minutes with a trained model. `model` as of `kvframework demo --model`. Raises `BenchFailed`,
    also if not every document was found, `DemoFailed` for a model that is not there, and the errors of blend for one
    that cannot be blended."""
    path = chosen_model(model).path
    loaded = local_model(str(path)) if path else local_llama()
    asked = questions()[:: max(1, len(questions()) // sizes.questions)][: sizes.questions]
    dealt = orders(asked, sizes.orders, sizes.seed)
    form = dialogue_of(loaded.tokenizer)
    answers: list[AnswerRow] = []
    seconds: dict[str, list[float]] = {}
    shares: dict[str, float] = {}
    with ExitStack() as stack:
        advance = stack.enter_context(stage("blend", len(dealt)))
        server = stack.enter_context(running_server(stack.enter_context(scratch()), _CAPACITY, _BLENDING))
        stack.enter_context(torch.no_grad())
        everything = _prompt(loaded.tokenizer, Dialogue(between=""), DOCUMENTS)
        before = encode(loaded.tokenizer, form.before)
        heads = {_BLEND: before, _ALONE: []} if before else {_BLEND: []}
        kvs = {name: stack.enter_context(_blending(loaded, server.endpoint, head)) for name, head in heads.items()}
        for kv in kvs.values():
            kv.pre_compute(everything.tokens, ranges=everything.ranges)
        for number, order in enumerate(dealt):
            prompt = _prompt(loaded.tokenizer, form, order.documents)
            ways = dict(_ways(kvs, loaded.model, prompt, sizes.shares))
            for name, way in ways.items():
                seconds.setdefault(name, []).append(way.seconds)
                shares[name] = way.recomputed
            answers += _asked(loaded, form, ways, order, number, asked, sizes.answer_tokens)
            advance()
    return BlendFigures(
        model=model,
        questions=len(asked),
        orders=len(dealt),
        prompt_tokens=len(prompt.tokens),
        answer_tokens=sizes.answer_tokens,
        ways=[
            WayRow.of(name, shares[name], seconds[name], [each for each in answers if each.way == name])
            for name in seconds
        ],
        answers=answers,
    )


def _prompt(tokenizer: Any, form: Dialogue, names: Sequence[str]) -> _Prompt:
    tokens = encode(tokenizer, form.before)
    ranges = []
    for name in names:
        part = encode(tokenizer, document(name))
        ranges.append((len(tokens), len(tokens) + len(part)))
        tokens += part
    # At least one token is left to compute.
    return _Prompt(tokens + encode(tokenizer, form.between or "\n"), ranges)


def _blending(loaded: DemoModel, endpoint: str, before: Sequence[int]) -> BlendTransformers:
    return BlendTransformers(
        loaded.model,
        endpoint=endpoint,
        model_name=loaded.name,
        before=before,
        connect_timeout_s=PATIENT,
        deadline_scale=PATIENT,
        transfer_timeout_s=60.0,
    )


def _ways(
    kvs: Mapping[str, BlendTransformers], model: Any, prompt: _Prompt, shares: Sequence[float]
) -> Iterator[tuple[str, _Way]]:
    documents = sum(end - start for start, end in prompt.ranges)

    def full() -> _Way:
        cache = DynamicCache()
        Forward(model).compute(prompt.tokens, cache)
        return _Way(cache, 0.0, 1.0)

    def blended(kv: BlendTransformers, share: float, change: Callable[[Loaded], Loaded]) -> _Way:
        loaded = kv.restore(prompt.tokens, ranges=prompt.ranges)
        done = kv.prefill(prompt.tokens, share=share, loaded=change(loaded))
        if done.blended.hit_tokens != documents:
            raise BenchFailed(f"the lookup found {done.blended.hit_tokens} of {documents} tokens of the documents")
        return _Way(done.cache, 0.0, done.blended.recomputed / documents)

    makers: dict[str, Callable[[], _Way]] = {FULL_WAY: full}
    for name, kv in kvs.items():
        for share in shares:
            makers[f"{name} {share:.0%}"] = partial(blended, kv, share, lambda loaded: loaded)
    makers[_NAIVE] = partial(blended, kvs.get(_ALONE) or kvs[_BLEND], 0.0, Loaded.unrotated)
    for name, make in makers.items():
        began = time.process_time()
        way = make()
        way.seconds = time.process_time() - began
        yield name, way


def _asked(
    loaded: DemoModel,
    form: Dialogue,
    ways: dict[str, _Way],
    order: Order,
    number: int,
    asked: Sequence[Question],
    length: int,
) -> Iterator[AnswerRow]:
    ends = end_tokens(loaded.model)
    answering = {name: Answering(loaded.model, way.cache, ends, length) for name, way in ways.items()}
    for at in order.questions:
        question = asked[at]
        ids = encode(loaded.tokenizer, f"{question.question}{form.behind}")
        answer = answering[FULL_WAY].answer(ids)
        expected = answering[FULL_WAY].scores(ids, answer)
        for name, each in answering.items():
            done = each.compared(ids, answer, expected)
            text = loaded.tokenizer.decode([token for token in done.tokens if token not in ends])
            yield AnswerRow(
                way=name,
                question=at,
                order=number,
                place=order.documents.index(question.document),
                same_first=done.same_first,
                same=done.same,
                agreement=done.agreement,
                first_divergence=done.first_divergence,
                divergence=done.divergence,
                right=question.answered_by(text),
                text=text,
            )
