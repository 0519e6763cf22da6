"""The part `codec`: how small a codec packs an object of KV in bfloat16, and what that costs one processor."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

from kvframework.api.codec import CodecProvider
from kvframework.api.plugin import DTYPE_BYTES
from kvframework.config.schema import PluginTable
from kvframework.registry.registry import PluginRegistry
from kvframework.registry.tables import resolve_table
from kvframework_bench.console import Stage
from kvframework_bench.errors import BenchUnavailable, WrongBytes
from kvframework_bench.l2.entropy import entropy_bound
from kvframework_bench.l2.figures import CodecRow
from kvframework_bench.l2.sizes import Sizes
from kvframework_bench.l2.tier import WHERE, check_plugin
from kvframework_bench.rounds import Spread

DTYPE = "bfloat16"
# How many of 256 numbers have this sign and these upper seven bits of the exponent, in the KV of SmolLM2-135M: 3.0 bits
# of entropy, as in the KV itself. The rest of a number, 7.99 bits there, is random here.
_EXPONENTS = {59: 1, 60: 4, 61: 11, 62: 36, 63: 58, 64: 17, 65: 1}
_EXPONENTS |= {187: 1, 188: 4, 189: 11, 190: 35, 191: 58, 192: 18, 193: 1}
_TABLE = bytes(exponent for exponent, times in _EXPONENTS.items() for _ in range(times))
MADE_UP = "synthetic numbers"

T = TypeVar("T")


def bench_codec(sizes: Sizes, registry: PluginRegistry, codec: str, kv: Path | None, stage: Stage) -> CodecRow:
    """Measure a codec on the content of the file `kv`, None for made numbers. Raises `BenchUnavailable` without the
    codec's packages or the file, and `WrongBytes`."""
    check_plugin(registry, "codec", codec)
    data = memoryview(_content(kv, sizes.object_bytes))
    provider, options = resolve_table(registry, PluginTable(codec, {}, WHERE), CodecProvider)
    made = provider.create(options)
    place = memoryview(bytearray(data.nbytes))
    pack_gb_s, unpack_gb_s, packed = [], [], b""
    with stage(f"codec {codec}", sizes.codec_rounds) as advance:
        for _ in range(sizes.codec_rounds):
            parts, seconds = _timed(partial(made.encode_elements, data, DTYPE))
            packed = b"".join(parts)
            del parts
            pack_gb_s.append(data.nbytes / seconds / 1e9)
            _, seconds = _timed(partial(made.decode_into, memoryview(packed), place))
            unpack_gb_s.append(data.nbytes / seconds / 1e9)
            if place != data:
                raise WrongBytes(f"codec {codec} unpacked other bytes than it packed")
            place[:1] = b"\0"
            advance()
    return CodecRow(
        codec=codec,
        content=kv.name if kv else MADE_UP,
        object_bytes=data.nbytes,
        ratio=len(packed) / data.nbytes,
        bound=entropy_bound(data, DTYPE_BYTES[DTYPE]),
        pack_gb_s=Spread.of(pack_gb_s),
        unpack_gb_s=Spread.of(unpack_gb_s),
    )


def _timed(work: Callable[[], T]) -> tuple[T, float]:
    began = time.thread_time()
    result = work()
    return result, time.thread_time() - began


def _content(kv: Path | None, nbytes: int) -> bytes:
    if kv is None:
        content = bytearray(os.urandom(nbytes))
        content[1::2] = os.urandom(nbytes // 2).translate(_TABLE)
        return bytes(content)
    try:
        with kv.open("rb") as file:
            found = file.read(nbytes)
    except OSError as error:
        raise BenchUnavailable(str(error), where=str(kv)) from None
    if not found:
        raise BenchUnavailable("the KV file is empty", where=str(kv))
    return found
