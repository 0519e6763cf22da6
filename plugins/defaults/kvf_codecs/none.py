"""The codec that packs nothing: it returns views of the object's own bytes."""

from __future__ import annotations

from collections.abc import Sequence

from kvframework.api.codec import Codec
from kvframework.api.copying import copy_bytes


class NoneCodec(Codec):
    name = "none"

    def encode(self, data: memoryview) -> Sequence[memoryview]:
        return [data]

    def decode_into(self, packed: memoryview, out: memoryview) -> None:
        if packed.nbytes != out.nbytes:
            raise ValueError(f"{packed.nbytes} bytes, expected {out.nbytes}")
        copy_bytes(out, packed)
