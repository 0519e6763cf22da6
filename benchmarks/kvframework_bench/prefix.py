"""A stored prefix and the timed LOOKUP of it. Objects are of a small shape and written by hand: no tensor is
needed.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable

import msgspec

from kvframework.api.keys import CacheKey
from kvframework.api.plugin import Buffer
from kvframework.api.transport import Registration
from kvframework.client import KVClient, RequestHashes, SchedulerAdapter
from kvframework.client.kv_client import bare_transfer
from kvframework.wire import messages as m
from kvframework.wire.frames import join
from kvframework.wire.protocol import non_gpu_layout
from kvframework_bench.errors import BenchFailed
from kvframework_bench.rounds import Case

MODEL = "bench"
_INSTANCE = 1
_CHUNK_TOKENS = 256
_WIDE = 1024
_SHAPE = m.RegisterNonGpuContextPayload(
    instance_id=_INSTANCE,
    model_name=MODEL,
    world_size=1,
    block_size=16,
    num_layers=2,
    hidden_dim_size=16,
    dtype_str="bfloat16",
    use_mla=False,
)


def shape_of(object_bytes: int) -> m.RegisterNonGpuContextPayload:
    """Return a shape whose objects, of the default chunk, have this many bytes: a multiple of 1 MiB."""
    layers, rest = divmod(object_bytes, 2 * _CHUNK_TOKENS * _WIDE * 2)
    if rest or not layers:
        raise ValueError(f"no shape has objects of {object_bytes} bytes")
    return msgspec.structs.replace(_SHAPE, num_layers=layers, hidden_dim_size=_WIDE)


def token_ids(count: int, *, known: bool) -> list[int]:
    """Return token ids as of a big vocabulary. The known ones of a length begin like those of every greater length."""
    return [(index * 7919 + (0 if known else 1)) % 128_000 for index in range(count)]


class Prefixes:
    """An instance's prompts: the constructor registers, the methods make requests and store them. For one thread."""

    def __init__(self, client: KVClient, shape: m.RegisterNonGpuContextPayload = _SHAPE) -> None:
        """Raises `ServerGone` and typed refusals."""
        self._client = client
        registered = client.request("REGISTER_KV_CACHE_NON_GPU_CONTEXT", shape, m.Registered)
        layout = non_gpu_layout(shape)
        self._registration = Registration(_INSTANCE, 0, registered.namespace, layout, registered.desc)
        self.namespace = registered.namespace
        self.chunk_tokens = registered.desc.chunk_tokens
        self.object_bytes = registered.desc.nbytes

    def request(self, tokens: list[int]) -> RequestHashes:
        """Return a request whose digests are computed, whole chunks of them."""
        keep = self._client.wants_tokens()
        request = RequestHashes(self._client.hasher, self.chunk_tokens, request_id="bench", keep_tokens=keep)
        request.extend(tokens)
        return request

    def key(self, request: RequestHashes, *, rank: int | None) -> CacheKey:
        """Return the key as the adapters make it."""
        end = request.hashed_tokens
        return CacheKey(
            model_name=MODEL,
            world_size=1,
            worker_id=rank,
            namespace=self.namespace,
            start=0,
            end=end,
            request_id=request.request_id,
            digests=request.digests(end),
        )

    def scheduler(self) -> SchedulerAdapter:
        return SchedulerAdapter(
            self._client, model_name=MODEL, namespace=self.namespace, chunk_tokens=self.chunk_tokens
        )

    def store(self, request: RequestHashes, content: Callable[[int], Buffer] = os.urandom) -> None:
        """Store every chunk of the request; `content` makes the bytes of an object. Raises `BenchFailed` unless all is
        stored."""
        transfer = bare_transfer(self._registration, self.key(request, rank=0))
        transfer = dataclasses.replace(transfer, content=request.content(0, request.hashed_tokens))
        with self._client.prepare_store(transfer).result() as plan:
            for place in plan.ranges:
                plan.arena[place.offset : place.offset + place.length] = content(place.length)
            outcome = plan.commit().result()
        chunks = request.hashed_tokens // self.chunk_tokens
        if outcome.stored != chunks:
            raise BenchFailed(f"the server stored {outcome.stored} of {chunks} chunks")

    def lookup_bytes(self, request: RequestHashes) -> int:
        """Return the size of the frames of its LOOKUP."""
        return sum(len(frame) for frame in join(1, "LOOKUP", m.Lookup(self.key(request, rank=None))))


def lookup_case(scheduler: SchedulerAdapter, request: RequestHashes, expected: int) -> Case:
    """Return one LOOKUP that finds `expected` tokens in L1. Raises `BenchFailed` if it does not, or failed."""

    def run() -> float:
        failures = scheduler.failures
        started = time.perf_counter()
        result = scheduler.lookup(request)
        seconds = time.perf_counter() - started
        scheduler.free(result)
        # A failed lookup reads as a miss, and would look like a fast one.
        if (result.hit_tokens, result.pending, scheduler.failures) != (expected, False, failures):
            raise BenchFailed(
                f"a lookup found {result.hit_tokens} tokens",
                available=f"{expected} tokens",
                hint="the log above says why a lookup failed" if scheduler.failures > failures else "",
            )
        return seconds

    return run
