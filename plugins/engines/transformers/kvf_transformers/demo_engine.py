"""One engine process of `kvframework demo`: restores, computes, saves, and writes each step as a JSON line to stdout.

Started as `python -m kvf_transformers.demo_engine`; everything but the JSON lines goes to stderr.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kvf_transformers.demo_model import SIZES, end_tokens, local_model, prompt_tokens, random_llama
from kvf_transformers.forward import Restored
from kvf_transformers.kv import TransformersKV
from kvframework.errors import KVFrameworkError

Emit = Callable[..., None]


def run_engine(run: Callable[[Emit], None]) -> None:
    """Run an engine, which gets `emit(event, **fields)`: it writes a JSON line to stdout. All else goes to stderr.

    An error of the framework becomes the event `failed`, with its parts, and exit status 1.
    """
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    # Libraries may print: stdout is for events only.
    events, sys.stdout = sys.stdout, sys.stderr

    def emit(event: str, **fields: Any) -> None:
        print(json.dumps({"event": event, **fields}), file=events, flush=True)

    try:
        run(emit)
    except KeyboardInterrupt:
        sys.exit(130)
    except KVFrameworkError as error:
        logging.getLogger(__name__).exception("the engine ends")
        emit("failed", fact=error.fact, where=error.where, available=error.available, hint=error.hint)
        sys.exit(1)


_WARM_UP_TOKENS = 64
# The shipped text is one piece.
_PIECE_TOKENS = 4096
# An engine that serves one prompt may wait longer than one that serves many.
_DEADLINE_SCALE = 50.0


def main() -> None:
    """Run the process. Exit status 0 when all steps ran, with any number of hits."""
    run_engine(partial(_run, _parse()))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--endpoint", required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--question", default="", help="the question that follows the text")
    parser.add_argument("--model", default="", help="a local folder or GGUF file; default: the random Llama")
    parser.add_argument("--size", choices=SIZES, default="full")
    parser.add_argument("--tokens", type=int, default=0, help="cut the text to so many tokens; 0: all")
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--wait", action="store_true", help="wait for a line of standard input before connecting")
    parser.add_argument("--corrupt-kv", action="store_true", help="damage the restored KV, to see the tokens change")
    return parser.parse_args()


def _run(arguments: argparse.Namespace, emit: Emit) -> None:
    started = time.perf_counter()
    name, model, tokenizer = local_model(arguments.model) if arguments.model else random_llama(arguments.size)
    prompt = prompt_tokens(
        tokenizer, arguments.text.read_text(encoding="utf-8"), arguments.question, cut_to=arguments.tokens
    )
    with torch.no_grad():
        # Thread pools and allocators start here, so that both engines are timed alike.
        model(input_ids=torch.tensor([prompt[:_WARM_UP_TOKENS]], device=model.device), use_cache=False)
        emit(
            "ready",
            model=name,
            parameters=sum(weight.numel() for weight in model.parameters()),
            layers=model.config.num_hidden_layers,
            threads=torch.get_num_threads(),
            prompt_tokens=len(prompt),
            seconds=time.perf_counter() - started,
        )
        if arguments.wait:
            sys.stdin.readline()
        with TransformersKV(
            model,
            endpoint=arguments.endpoint,
            model_name=name,
            connect_timeout_s=20.0,
            deadline_scale=_DEADLINE_SCALE,
            transfer_timeout_s=60.0,
        ) as kv:
            _serve(arguments, emit, kv, prompt, tokenizer, end_tokens(model))


def _serve(
    arguments: argparse.Namespace,
    emit: Emit,
    kv: TransformersKV,
    prompt: list[int],
    tokenizer: Any,
    ends: frozenset[int],
) -> None:
    started = time.perf_counter()
    restored = kv.restore(prompt)
    emit(
        "restored",
        hit_tokens=restored.hit_tokens,
        nbytes=restored.nbytes,
        seconds=restored.seconds,
        copy_seconds=restored.copy_seconds,
    )
    if arguments.corrupt_kv:
        for layer in restored.cache.layers:
            layer.keys.neg_()
            layer.values.neg_()
    logits, cache = _prefill(emit, kv, prompt, restored)
    tokens: list[int] = []
    for token in kv.decode(logits, cache, arguments.new_tokens):
        if not tokens:
            emit("first_token", seconds=time.perf_counter() - started)
        tokens.append(token)
        emit("token", text=tokenizer.decode([token]), count=len(tokens))
        if token in ends:
            break
    # Deliberately damaged KV must not be stored.
    if not arguments.corrupt_kv:
        saved = kv.save(prompt, cache)
        emit("saved", tokens=saved.tokens, nbytes=saved.nbytes, seconds=saved.seconds, copy_seconds=saved.copy_seconds)
    emit("done", tokens=tokens, text=tokenizer.decode(tokens, skip_special_tokens=True), ended=tokens[-1] in ends)


def _prefill(emit: Emit, kv: TransformersKV, prompt: list[int], restored: Restored) -> tuple[torch.Tensor, Any]:
    """Compute the rest of the prompt in pieces, so that a long one shows how far it is."""
    done = restored.hit_tokens
    while True:
        end = min(done + _PIECE_TOKENS, len(prompt))
        logits, cache, restored = kv.prefill(prompt[:end], replace(restored, hit_tokens=done))
        emit("computed", tokens=end)
        if end == len(prompt):
            return logits, cache
        done = end


if __name__ == "__main__":
    main()
