"""The sizes of each part of `kvframework bench l2`. Pure."""

from __future__ import annotations

import msgspec

from kvframework_bench.workload import SHAPES, Shape

_MIB = 1 << 20


class Sizes(msgspec.Struct, frozen=True):
    """The sizes of all parts. `call_bytes` are the bytes of one call of a tier, as of a batch of the server's.
    `lookup_calls` are those of one round. `object_bytes`, `prompt_objects` and `prompts` are of the memory part: a
    prompt moves that often."""

    value_bytes: tuple[int, ...] = (4 * _MIB, 32 * _MIB)
    call_bytes: int = 64 * _MIB
    redis_rounds: int = 30
    s3_rounds: int = 8
    mooncake_rounds: int = 30
    tool_bytes: int = 512 * _MIB
    tool_runs: int = 3
    shapes: tuple[Shape, ...] = (SHAPES["llama-3-8b"], SHAPES["12kb"])
    engine_rounds: int = 10
    disk_rounds: int = 8
    lookup_tokens: tuple[int, ...] = (1024, 32768)
    lookup_rounds: int = 300
    lookup_calls: int = 20
    object_bytes: int = 32 * _MIB
    prompt_objects: int = 8
    prompts: int = 5
    codec_rounds: int = 10


FULL = Sizes()
QUICK = Sizes(
    value_bytes=(_MIB, 2 * _MIB),
    call_bytes=4 * _MIB,
    redis_rounds=2,
    s3_rounds=2,
    mooncake_rounds=2,
    tool_bytes=8 * _MIB,
    tool_runs=1,
    shapes=(SHAPES["12kb"].quick(),),
    engine_rounds=2,
    disk_rounds=2,
    lookup_tokens=(1024,),
    lookup_rounds=5,
    lookup_calls=5,
    object_bytes=4 * _MIB,
    prompt_objects=4,
    prompts=2,
    codec_rounds=2,
)
