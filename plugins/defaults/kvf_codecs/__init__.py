"""The codecs `none`, `zstd` and `planes`: the packing of an object's bytes for an L2 tier. Runs in storage threads.

Importing this module does not import zstandard, so that a list of plugins stays cheap."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Annotated, Any

from msgspec import Meta

from kvframework.api.codec import Codec, CodecProvider, hookimpl
from kvframework.api.copying import copy_bytes
from kvframework.api.installing import install_command
from kvframework.api.plugin import Options


class NoneCodec(Codec):
    name = "none"

    def encode(self, data: memoryview) -> Sequence[memoryview]:
        return [data]

    def decode_into(self, packed: memoryview, out: memoryview) -> None:
        if packed.nbytes != out.nbytes:
            raise ValueError(f"the value has {packed.nbytes} bytes, expected {out.nbytes}")
        copy_bytes(out, packed)


class ZstdOptions(Options, frozen=True):
    level: Annotated[
        int,
        Meta(
            ge=-7,
            le=22,
            description="Zstandard's level: higher packs smaller and slower, negative is fastest; 0: the default, 3",
        ),
    ] = 1


def _probe() -> str | None:
    if find_spec("zstandard") is None:
        return f"zstandard is not installed: {install_command('zstd')}"
    return None


def _zstd(options: ZstdOptions) -> Codec:
    from kvf_codecs.zstd import ZstdCodec

    return ZstdCodec(options.level)


def _probe_planes() -> str | None:
    from kvf_codecs.plane_kernel import why_no_kernel

    return _probe() or why_no_kernel()


def _planes(_options: Options) -> Codec:
    from kvf_codecs.planes import PlanesCodec

    return PlanesCodec()


@hookimpl
def kvf_codecs() -> list[CodecProvider[Any]]:
    """The providers of all three codecs."""
    return [
        CodecProvider(name="none", summary="stores bytes unpacked, without a copy", create=lambda _: NoneCodec()),
        CodecProvider(
            name="zstd", summary="packs by Zstandard, lossless", options=ZstdOptions, probe=_probe, create=_zstd
        ),
        CodecProvider(
            name="planes", summary="packs by byte planes, then Zstandard, lossless", probe=_probe_planes, create=_planes
        ),
    ]
