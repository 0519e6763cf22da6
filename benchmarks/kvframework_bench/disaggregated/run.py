"""The measurement: a prefiller and a decoder of vLLM behind one server, each on a core. A request goes to the prefiller
for one token and then to the decoder, as a router sends it; or to the decoder alone, which computes it."""

from __future__ import annotations

import http.client
import json
import os
import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import msgspec

from kvframework_bench.console import Stage, no_progress
from kvframework_bench.disaggregated.figures import (
    CACHED,
    COMPUTED,
    NIXL,
    WAYS,
    DisaggregatedFigures,
    DisaggregatedRow,
    Taken,
    crossings_of,
    row_of,
)
from kvframework_bench.errors import BenchFailed, BenchUnavailable
from kvframework_bench.lmcache_server import free_port
from kvframework_bench.process import adopting, scratch
from kvframework_bench.server import running_server
from kvframework_bench.serving.engines import SERVED, Engine, EngineSettings, running_engine
from kvframework_bench.serving.model import SHAPES, made_model, read_config

_ANSWER_S = 300.0
_CAPACITY = 1 << 30


class DisaggregatedSizes(msgspec.Struct, frozen=True):
    """Prompts end within a block, as prompts do: of one that ends with a block vLLM computes that block again."""

    rounds: int
    prompts: tuple[int, ...] = (320, 576, 1088, 2112)
    at_once: tuple[int, ...] = (1, 4)


FULL = DisaggregatedSizes(rounds=3)
QUICK = DisaggregatedSizes(rounds=1, prompts=(320, 576), at_once=(1,))


def bench_disaggregated(
    sizes: DisaggregatedSizes, *, model: Path | None = None, stage: Stage = no_progress
) -> DisaggregatedFigures:
    """Measure. `model` is a folder, None for the bench's own.

    Raises `BenchUnavailable` without NIXL, and `BenchFailed`, with the end of its log, for an engine that does not
    start, ends, or computes what it should have got.
    """
    if find_spec("nixl") is None:
        raise BenchUnavailable("NIXL is not installed", hint="pip install --no-deps nixl==1.5.1 nixl-cu13==1.5.1")
    with scratch() as directory, adopting():
        name = model.name if model else str(SHAPES["large_kv"])
        model = model or made_model(directory, "large_kv")
        config = read_config(model)
        longest = max(sizes.prompts) + 256
        held = (max(sizes.at_once) + 1) * longest * config.kv_bytes
        settings = EngineSettings(model, longest, held)
        cores = sorted(os.sched_getaffinity(0))
        with running_server(directory, _CAPACITY) as server:
            offload = [_transfer(server.endpoint, role) for role in ("kv_producer", "kv_consumer")]
            with (
                running_engine("prefiller", settings, offload[0], cores[:1], directory, _side()) as prefiller,
                running_engine("decoder", settings, offload[1], cores[-1:], directory, _side()) as decoder,
            ):
                with stage("starting vLLM", 2) as advance:
                    for engine in (prefiller, decoder):
                        engine.await_answer()
                        advance()
                rows = _Measured(prefiller, decoder, config.vocab_size).rows(sizes, stage)
    return DisaggregatedFigures(name, config.kv_bytes, rows, crossings_of(rows))


def _transfer(endpoint: str, role: str) -> list[str]:
    each = {"kv_load_failure_policy": "recompute"}
    nixl = {"kv_connector": "NixlConnector", "kv_role": role, "kv_buffer_device": "cpu", **each}
    extra = {"kvframework.endpoint": endpoint}
    ours = {"kv_connector": "KvFrameworkConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra, **each}
    both = {"kv_connector_extra_config": {"connectors": [nixl, ours]}}
    config = {"kv_connector": "MultiConnector", "kv_role": role, **both, **each}
    return ["--kv-transfer-config", json.dumps(config)]


def _side() -> dict[str, str]:
    return {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())}


class _Measured:
    def __init__(self, prefiller: Engine, decoder: Engine, vocabulary: int) -> None:
        self._prefiller, self._decoder = prefiller, decoder
        self._random = random.Random(11)
        self._vocabulary = vocabulary

    def rows(self, sizes: DisaggregatedSizes, stage: Stage) -> list[DisaggregatedRow]:
        """Every case once a round, every other round backwards; a round before them counts nowhere: the engines have
        met by then."""
        cases = list(product(sizes.at_once, sizes.prompts, WAYS))
        found: dict[tuple[int, int, str], list[list[Taken]]] = {case: [] for case in cases}
        for at_once, tokens, way in cases[: len(WAYS)]:
            self._all(way, tokens, at_once)
        with stage("requests", sizes.rounds * len(cases)) as advance:
            for number in range(sizes.rounds):
                for case in cases[:: -1 if number % 2 else 1]:
                    at_once, tokens, way = case
                    found[case].append(self._all(way, tokens, at_once))
                    advance()
        return [row_of(way, tokens, at_once, found[at_once, tokens, way]) for at_once, tokens, way in cases]

    def _all(self, way: str, tokens: int, at_once: int) -> list[Taken]:
        # No two share a block.
        prompts = [[self._random.randrange(3, self._vocabulary) for _ in range(tokens)] for _ in range(at_once)]
        with ThreadPoolExecutor(at_once) as threads:
            return list(threads.map(lambda prompt: self._one(way, prompt), prompts))

    def _one(self, way: str, prompt: Sequence[int]) -> Taken:
        began = time.perf_counter()
        place = None
        if way != COMPUTED:
            answer = self._asked(self._prefiller, prompt, {"do_remote_decode": True} if way == NIXL else None)
            place = answer.get("kv_transfer_params")
            if way == NIXL and not place:
                raise self._prefiller.child.failure("does not say where its KV lies")
        at_decoder = time.perf_counter()
        # The answer has one token, so its end is that of the first.
        answer = self._asked(self._decoder, prompt, place if way == NIXL else None)
        ended = time.perf_counter()
        hit = int((answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
        if (hit == 0) != (way == COMPUTED) and way != CACHED:
            raise self._decoder.child.failure(f"got {hit} of {len(prompt)} tokens {way}")
        return Taken(ended - began, ended - at_decoder, hit)

    def _asked(self, engine: Engine, prompt: Sequence[int], transfer: dict[str, Any] | None) -> dict[str, Any]:
        body = {"model": SERVED, "prompt": prompt, "max_tokens": 1, "temperature": 0, "kv_transfer_params": transfer}
        with closing(http.client.HTTPConnection("127.0.0.1", engine.port, timeout=_ANSWER_S)) as connection:
            try:
                connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
                reply = connection.getresponse()
                text = reply.read()
            except (OSError, http.client.HTTPException) as error:
                engine.child.check_alive()
                raise BenchFailed(f"{engine.name} does not answer: {error}") from error
        if reply.status != 200:
            raise engine.child.failure(f"answers with status {reply.status}: {text[:400]!r}")
        answer: dict[str, Any] = json.loads(text)
        return answer
