"""One engine process of `kvframework demo blend`: pre-computes documents, or asks a question over them in every way,
and reports each step as a JSON line on stdout.

Started as `python -m kvf_blend.engine.demo_engine`; everything but the JSON lines goes to stderr.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kvf_blend.engine.blend import Blended, BlendTransformers
from kvf_transformers.demo_engine import Emit, run_engine
from kvf_transformers.demo_model import (
    SEED,
    ByteTokenizer,
    DemoModel,
    dialogue_of,
    encode,
    end_tokens,
    llama_config,
    local_model,
)
from transformers import LlamaForCausalLM

DOCUMENTS = 4
# No document keeps the position that it was computed at, and none follows the same document as there.
_SHUFFLED = (2, 0, 3, 1)
_WARM_UP_TOKENS = 64
_ANSWER_TOKENS = 24
# An engine that serves one prompt may wait longer than one that serves many.
_DEADLINE_SCALE = 50.0


def main() -> None:
    """The process. Exit status 0 when all steps ran, with or without hits."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=("store", "ask"))
    parser.add_argument("--endpoint", required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--question", default="")
    parser.add_argument("--model", default="", help="a local folder or GGUF file; default: the random Llama")
    parser.add_argument("--size", choices=SIZES, default="full")
    parser.add_argument("--tokens", type=int, default=0, help="of each document; 0: all")
    parser.add_argument("--share", type=float, default=0.15)
    run_engine(partial(_run, parser.parse_args()))


def _run(arguments: argparse.Namespace, emit: Emit) -> None:
    name, model, tokenizer = local_model(arguments.model) if arguments.model else local_llama(arguments.size)
    form = dialogue_of(tokenizer)
    before = encode(tokenizer, form.before)
    documents = _documents(arguments.text.read_text(encoding="utf-8"), tokenizer, arguments.tokens)
    with (
        torch.no_grad(),
        BlendTransformers(
            model,
            endpoint=arguments.endpoint,
            model_name=name,
            share=arguments.share,
            before=before,
            connect_timeout_s=20.0,
            deadline_scale=_DEADLINE_SCALE,
            transfer_timeout_s=60.0,
        ) as kv,
    ):
        # Thread pools and allocators start here, so that all ways are timed alike.
        model(input_ids=torch.tensor([documents[0][:_WARM_UP_TOKENS]], device=model.device), use_cache=False)
        emit(
            "ready",
            model=name,
            parameters=sum(weight.numel() for weight in model.parameters()),
            documents=[len(document) for document in documents],
        )
        if arguments.part == "store":
            tokens, ranges = _joined((), documents, ())
            stored = kv.pre_compute(tokens, ranges=ranges)
            emit("stored", documents=stored.held, nbytes=stored.nbytes, seconds=stored.seconds)
        else:
            question = encode(tokenizer, f"{form.between}{arguments.question}{form.behind}")
            shuffled = [documents[at] for at in _SHUFFLED]
            answer = partial(_answer, kv, model, tokenizer)
            _ask(kv, model, _joined(before, shuffled, question), answer, emit)


def _ask(
    kv: BlendTransformers,
    model: Any,
    prompt: tuple[list[int], list[tuple[int, int]]],
    answer: Callable[[torch.Tensor, Any], str],
    emit: Emit,
) -> None:
    tokens, ranges = prompt
    emit("prompt", tokens=len(tokens))
    started = time.perf_counter()
    ids = torch.tensor([tokens], device=model.device)
    output = model(input_ids=ids, use_cache=True, logits_to_keep=1)
    full, seconds = output.logits[:, -1], time.perf_counter() - started
    _tell(emit, "full", seconds, Blended(len(tokens)), full, full, answer(full, output.past_key_values))
    # Blend goes first: it brings objects into memory, where the other ways find them.
    for way in ("blend", "rotated", "naive"):
        started = time.perf_counter()
        loaded = kv.restore(tokens, ranges=ranges)
        if way == "naive":
            loaded = loaded.unrotated()
        done = kv.prefill(tokens, share=None if way == "blend" else 0.0, loaded=loaded)
        seconds = time.perf_counter() - started
        _tell(emit, way, seconds, done.blended, done.logits, full, answer(done.logits, done.cache))


def _answer(kv: BlendTransformers, model: Any, tokenizer: Any, logits: torch.Tensor, cache: Any) -> str:
    """What the model says then; "" of random weights, which say nothing."""
    if isinstance(tokenizer, ByteTokenizer):
        return ""
    tokens = []
    for token in kv.decode(logits, cache, _ANSWER_TOKENS):
        if token in end_tokens(model):
            break
        tokens.append(token)
    return str(tokenizer.decode(tokens, skip_special_tokens=True))


def _tell(
    emit: Emit,
    way: str,
    ttft_s: float,
    blended: Blended,
    logits: torch.Tensor,
    full: torch.Tensor,
    text: str,
) -> None:
    found, expected = logits.double().log_softmax(-1), full.double().log_softmax(-1)
    emit(
        "way",
        name=way,
        ttft_s=ttft_s,
        hit_tokens=blended.hit_tokens,
        recomputed=blended.recomputed,
        distance=float((logits - full).norm() / full.norm()),
        divergence=max(0.0, float((expected.exp() * (expected - found)).sum())),
        same_token=bool(logits.argmax() == full.argmax()),
        text=text,
    )


def _documents(text: str, tokenizer: Any, tokens: int) -> list[list[int]]:
    """The text's quarters, each cut to `tokens` if that is not 0."""
    length = -(-len(text) // DOCUMENTS)
    parts = [encode(tokenizer, text[at * length : (at + 1) * length]) for at in range(DOCUMENTS)]
    return [part[:tokens] if tokens else part for part in parts]


def _joined(
    before: Sequence[int], documents: Sequence[list[int]], question: Sequence[int]
) -> tuple[list[int], list[tuple[int, int]]]:
    """All documents and the question as one text, and the range of each document in it."""
    tokens = [*before]
    ranges = []
    for document in documents:
        ranges.append((len(tokens), len(tokens) + len(document)))
        tokens += document
    return [*tokens, *question], ranges


# layers, hidden size, intermediate size, attention heads, KV heads
SIZES = {"full": (10, 768, 2048, 12, 4), "tiny": (4, 128, 256, 4, 4)}
# Distance in tokens beyond which the heads of a KV head no longer tell near from far; the weight of nearness in scores;
# the part of the residual stream that attention writes, relative to that of the tokens themselves.
_REACHES = (32, 64, 128, 256)
_NEARNESS = 16.0
_CONTEXT = 2.0


def local_llama(size: str) -> DemoModel:
    """A Llama with random weights whose attention falls with distance, the same in every process.

    Plain random weights attend to all tokens alike, near or far. Trained models attend mostly to near tokens, which is
    why few tokens of a document depend on the text before it; blending relies on that. So the model has this property
    built in by the rotary positions themselves: all embeddings share one direction, which W_q and W_k map to one
    constant vector per head. Its rotated copies agree the less the further they are apart, up to the head's reach.
    """
    torch.manual_seed(SEED)
    model = LlamaForCausalLM(llama_config(*SIZES[size])).float().eval()
    with torch.no_grad():
        _fill(model)
    return DemoModel(f"kvframework-demo-local-llama-{size}-{SEED}", model, ByteTokenizer())


def _fill(model: LlamaForCausalLM) -> None:
    hidden, layers = model.config.hidden_size, model.config.num_hidden_layers
    model.model.embed_tokens.weight.normal_()
    model.model.embed_tokens.weight[:, 0] = hidden**0.5
    # Mean squares of the residual stream: its shared direction keeps 1, and the rest grows from 1 to 2.
    for index, layer in enumerate(model.model.layers):
        total = 2 + index / layers
        shared, rest = (hidden / total) ** 0.5, ((total - 1) / total * hidden) ** 0.5
        attention, mlp = layer.self_attn, layer.mlp
        for weight in (attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj):
            weight.weight.normal_(0, 1 / rest)
            weight.weight[:, 0] = 0
        for weight, gain in ((attention.o_proj, _CONTEXT), (mlp.down_proj, 1.0)):
            weight.weight.normal_(0, gain * (2 * layers * weight.in_features) ** -0.5)
            weight.weight[0] = 0
        _attend_to_the_near(attention, model.model.rotary_emb.inv_freq, shared)
    model.lm_head.weight.normal_(0, 2 / hidden**0.5)


def _attend_to_the_near(attention: Any, frequencies: torch.Tensor, shared: float) -> None:
    dim, group = attention.head_dim, attention.num_key_value_groups
    for kv_head in range(attention.config.num_key_value_heads):
        turning = frequencies >= 1 / _REACHES[kv_head % len(_REACHES)]
        constant = torch.zeros(dim)
        constant[: dim // 2][turning] = (_NEARNESS * dim**0.5 / turning.sum()) ** 0.5 / shared
        attention.k_proj.weight[kv_head * dim : (kv_head + 1) * dim, 0] = constant
        attention.q_proj.weight[kv_head * group * dim : (kv_head + 1) * group * dim, 0] = constant.repeat(group)


if __name__ == "__main__":
    main()
