"""The codecs `none` and `zstd`: what every codec must do, and what frames there may be."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from kvf_dev.testing import CodecConformance
from kvframework.api.codec import Codec
from kvframework.api.installing import install_command
from kvframework.errors import ConfigFieldError, PluginUnavailable
from kvframework.registry.registry import PluginRegistry
from tests.support.processes import ran

try:
    import zstandard

    from kvf_codecs.zstd import ZstdCodec
except ImportError:
    HAS_ZSTD = False
else:
    HAS_ZSTD = True

needs_zstd = pytest.mark.skipif(not HAS_ZSTD, reason="zstandard is not installed")
MIB = 1 << 20
SAMPLE = b"keys and values " * 4096


def pack(codec: Codec, data: bytes) -> bytes:
    return b"".join(codec.encode(memoryview(data)))


def unpack(codec: Codec, packed: bytes, nbytes: int) -> bytes:
    out = bytearray(b"\xee" * nbytes)
    codec.decode_into(memoryview(packed), memoryview(out))
    return bytes(out)


class TestNone(CodecConformance):
    use = "none"
    detects_damage = False  # the envelope's checksum does


@needs_zstd
class TestZstd(CodecConformance):
    use = "zstd"


@needs_zstd
@pytest.mark.parametrize("content", [b"", b"x", SAMPLE], ids=["empty", "one", "many"])
def test_another_frame_beside_it_is_refused(content: bytes) -> None:
    tried = ZstdCodec(1)
    packed = pack(tried, content)
    library = zstandard.ZstdCompressor()
    skippable = b"\x50\x2a\x4d\x18" + (3).to_bytes(4, "little") + b"abc"
    for more in (pack(tried, b"more"), library.compress(b""), skippable):
        with pytest.raises(ValueError):
            unpack(tried, packed + more, len(content))
        with pytest.raises(ValueError):
            unpack(tried, more + packed, len(content))


@needs_zstd
@pytest.mark.parametrize("content", [b"x", SAMPLE])
def test_a_frame_that_does_not_tell_its_size_is_refused(content: bytes) -> None:
    packed = zstandard.ZstdCompressor(write_content_size=False).compress(content)
    with pytest.raises(ValueError, match="expected"):
        unpack(ZstdCodec(1), packed, len(content))


@needs_zstd
@pytest.mark.parametrize("level", [-7, 1, 19])
def test_a_large_object_that_packs_to_next_to_nothing_comes_back(level: int) -> None:
    for content in (bytes(9 * MIB), SAMPLE * 100):
        packed = pack(ZstdCodec(level), content)
        assert len(packed) < len(content) // 500
        assert unpack(ZstdCodec(1), packed, len(content)) == content


@needs_zstd
def test_a_flood_of_empty_blocks_is_refused_soon() -> None:
    """Each costs as long as one that holds 128 KiB."""
    (whole,) = ZstdCodec(1).encode(memoryview(SAMPLE))
    header = zstandard.frame_header_size(whole)
    flood = bytes(whole[:header]) + bytes(3) * 50_000 + bytes(whole[header:])
    with pytest.raises(ValueError, match="too many blocks"):
        unpack(ZstdCodec(1), flood, len(SAMPLE))


def bomb(claimed: int) -> bytes:
    """A frame that unpacks to 256 MiB of zeros, and says that it were `claimed` bytes."""
    compressor = zstandard.ZstdCompressor(level=1).compressobj(size=256 * MIB)
    zeros = bytes(MIB)
    packed = b"".join([*(compressor.compress(zeros) for _ in range(256)), compressor.flush()])
    assert packed[6:10] == (256 * MIB).to_bytes(4, "little")
    return packed[:6] + claimed.to_bytes(4, "little") + packed[10:]


UNPACKING = """
import importlib, resource, sys
module, name, nbytes, *arguments = sys.argv[1:]
codec = getattr(importlib.import_module(module), name)(*map(int, arguments))
packed, out = memoryview(sys.stdin.buffer.read()), memoryview(bytearray(int(nbytes)))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for _ in range(3):
    try:
        codec.decode_into(packed, out)
    except ValueError:
        pass
    else:
        sys.exit("unpacked")
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def kib_taken_in_vain(codec: type[Codec], packed: bytes, nbytes: int, *arguments: int) -> int:
    """The memory that a process takes for packed bytes that the codec refuses."""
    command = [sys.executable, "-c", UNPACKING, codec.__module__, codec.__name__, *map(str, (nbytes, *arguments))]
    done = subprocess.run(command, input=packed, capture_output=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return int(done.stdout)


@needs_zstd
@pytest.mark.parametrize("claimed", [256 * MIB, MIB, None], ids=["that says so", "that lies", "of a huge window"])
def test_a_bomb_needs_no_more_memory_than_an_object(claimed: int | None) -> None:
    wide = bytes.fromhex("28b52ffd 80 88") + MIB.to_bytes(4, "little") + bytes.fromhex("02000000")
    assert kib_taken_in_vain(ZstdCodec, bomb(claimed) if claimed else wide, MIB, 1) < 16 << 10


@needs_zstd
@pytest.mark.parametrize("level", [-7, 0, 1, 3, 22])
def test_every_level_is_read_by_every_other(level: int) -> None:
    registry = PluginRegistry()
    provider = registry.resolve("codec", "zstd")
    options = registry.options(provider, {"level": level}, where="[codecs.zstd]")
    tried = provider.create(options)
    assert unpack(ZstdCodec(1), pack(tried, SAMPLE), len(SAMPLE)) == SAMPLE


@needs_zstd
@pytest.mark.parametrize("level", [-8, 23, "high", 1.5])
def test_levels_that_do_not_exist_are_refused(level: object) -> None:
    registry = PluginRegistry()
    with pytest.raises(ConfigFieldError, match="level"):
        registry.options(registry.resolve("codec", "zstd"), {"level": level}, where="[codecs.zstd]")


def test_without_zstandard_the_codec_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    registry = PluginRegistry()
    lines = {info.name: info for info in registry.list(probe=True) if info.kind == "codec"}
    assert (lines["none"].status, lines["zstd"].status) == ("available", "unavailable")
    with pytest.raises(PluginUnavailable, match=re.escape(install_command("zstd"))):
        registry.resolve("codec", "zstd")


def test_a_list_of_plugins_imports_no_zstandard() -> None:
    script = (
        "import sys, kvf_codecs\n"
        "none, zstd, planes = kvf_codecs.kvf_codecs()\n"
        "zstd.probe(), planes.probe(), none.create(none.options())\n"
        "print('zstandard' in sys.modules)"
    )
    done = ran(sys.executable, "-c", script)
    assert done.stdout.strip() == "False"
