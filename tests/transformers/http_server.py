"""An engine process of transformers with an HTTP server, one request at a time: `python -m
tests.transformers.http_server PORT FAMILY [ENDPOINT]`. A generation ends when its client has hung up. Without an
endpoint there is no cache.

A hybrid's generation is that of `TransformersKV`, which keeps states on the way; others use `model.generate`.
"""

from __future__ import annotations

import json
import logging
import select
import socket
import sys
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import torch

import transformers
from kvf_transformers import TransformersKV
from tests.transformers.hybrid_models import SMALL, made
from tests.transformers.program import FAMILIES

# The tokens of the answer, and how many of the prompt's were loaded.
Generate = Callable[[list[int], int, socket.socket], tuple[list[int], int]]


def hung_up(client: socket.socket) -> bool:
    readable, _, _ = select.select([client], [], [], 0)
    return bool(readable) and not client.recv(1, socket.MSG_PEEK)


class HungUp(transformers.StoppingCriteria):
    def __init__(self, client: socket.socket) -> None:
        self._client = client

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **kwargs: Any) -> Any:
        return torch.full((input_ids.shape[0],), hung_up(self._client))


def generated(model: Any, tokens: list[int], count: int, client: socket.socket, **more: Any) -> list[int]:
    ids = torch.tensor([tokens])
    found = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        do_sample=False,
        stopping_criteria=transformers.StoppingCriteriaList([HungUp(client)]),
        **more,
    )
    return found[0].tolist()


def plain(model: Any) -> Generate:
    def generate(tokens: list[int], count: int, client: socket.socket) -> tuple[list[int], int]:
        return generated(model, tokens, count, client)[len(tokens) :], 0

    return generate


def by_model(model: Any, kv: TransformersKV) -> Generate:
    """`model.generate` goes on from what is restored; what it has made is stored, whether it was broken off or not."""

    def generate(tokens: list[int], count: int, client: socket.socket) -> tuple[list[int], int]:
        restored = kv.restore(tokens)
        whole = generated(model, tokens, count, client, past_key_values=restored.cache)
        kv.save(whole, restored.cache)
        return whole[len(tokens) :], restored.hit_tokens

    return generate


def by_kv(kv: TransformersKV) -> Generate:
    def generate(tokens: list[int], count: int, client: socket.socket) -> tuple[list[int], int]:
        logits, cache, restored = kv.prefill(tokens)
        answer: list[int] = []
        for token in kv.decode(logits, cache, count):
            answer.append(token)
            if hung_up(client):
                break
        kv.save([*tokens, *answer], cache)
        return answer, restored.hit_tokens

    return generate


def serve(port: int, generate: Generate) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._reply({})

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with torch.no_grad():
                tokens, cached = generate(asked["tokens"], asked["count"], self.connection)
            self._reply({"tokens": tokens, "cached": cached})

        def _reply(self, content: dict[str, Any]) -> None:
            body = json.dumps(content).encode()
            try:
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)
            except ConnectionError:
                logging.info("hung up")

        def log_message(self, *_args: object) -> None:
            """Say nothing of each request."""

    class Server(HTTPServer):
        request_queue_size = 64

    Server(("127.0.0.1", port), Handler).serve_forever()


def main() -> None:
    logging.basicConfig(level=logging.INFO)
    port, family, endpoint = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    SMALL["max_position_embeddings"] = 4096
    model = made(FAMILIES[family]())
    if not endpoint:
        serve(port, plain(model))
    with TransformersKV(
        model, endpoint=endpoint, model_name=family, deadline_scale=10.0, transfer_timeout_s=60.0, state_interval=128
    ) as kv:
        serve(port, by_model(model, kv) if family == "llama" else by_kv(kv))


if __name__ == "__main__":
    main()
