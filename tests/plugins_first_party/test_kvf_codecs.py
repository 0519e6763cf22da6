"""The codecs `none` and `zstd`: what goes in comes out, and nothing else does, within bounds."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvf_codecs import kvf_codecs as hook
from kvf_codecs.none import NoneCodec
from kvframework.api import Codec
from kvframework.errors import ConfigFieldError, PluginUnavailable
from kvframework.plugins import PluginRegistry

try:
    import zstandard

    from kvf_codecs.zstd import ZstdCodec
except ImportError:
    HAS_ZSTD = False
    CODECS = ["none"]
else:
    HAS_ZSTD = True
    CODECS = ["none", "zstd"]

needs_zstd = pytest.mark.skipif(not HAS_ZSTD, reason="zstandard is not installed")
MIB = 1 << 20
SAMPLE = b"keys and values " * 4096


def codec(name: str) -> Codec:
    return NoneCodec() if name == "none" else ZstdCodec(1)


def pack(codec: Codec, data: bytes) -> bytes:
    return b"".join(codec.encode(memoryview(data)))


def unpack(codec: Codec, packed: bytes, nbytes: int) -> bytes:
    out = bytearray(b"\xee" * nbytes)
    codec.decode_into(memoryview(packed), memoryview(out))
    return bytes(out)


datas = st.binary(max_size=5000) | st.builds(
    lambda piece, times: piece * times, st.binary(max_size=40), st.integers(0, 900)
)


@pytest.mark.parametrize("name", CODECS)
@settings(deadline=None)
@given(data=datas)
def test_what_is_packed_is_unpacked(name: str, data: bytes) -> None:
    tried = codec(name)
    assert unpack(tried, pack(tried, data), len(data)) == data


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("data", [b"", b"\0", b"x", bytes(300_000)], ids=["empty", "zero", "one", "zeros"])
def test_the_smallest_and_the_emptiest(name: str, data: bytes) -> None:
    tried = codec(name)
    assert unpack(tried, pack(tried, data), len(data)) == data


@pytest.mark.parametrize("name", CODECS)
def test_memory_that_may_only_be_read_and_pieces_of_memory(name: str) -> None:
    tried = codec(name)
    arena = memoryview(bytearray(SAMPLE))
    packed = b"".join(tried.encode(arena[16:1616].toreadonly()))
    target = memoryview(bytearray(b"\xee" * 2000))
    tried.decode_into(memoryview(packed), target[200:1800])
    assert target[200:1800] == SAMPLE[16:1616]
    assert set(target[:200]) == set(target[1800:]) == {0xEE}


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize(("packed", "expected"), [(0, 1), (1, 0), (1, 2), (1, MIB), (5000, 4999), (5000, 5001)])
def test_another_length_is_refused(name: str, packed: int, expected: int) -> None:
    tried = codec(name)
    with pytest.raises(ValueError):
        unpack(tried, pack(tried, SAMPLE[:packed]), expected)


@needs_zstd
@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_a_damaged_frame_is_refused(data: st.DataObject) -> None:
    """Any bit: the frame has a checksum of what it unpacks to."""
    tried = ZstdCodec(1)
    content = data.draw(st.sampled_from([b"x", bytes(range(256)) * 3, SAMPLE]))
    packed = bytearray(pack(tried, content))
    bit = data.draw(st.integers(0, len(packed) * 8 - 1))
    packed[bit // 8] ^= 1 << bit % 8
    try:
        found = unpack(tried, bytes(packed), len(content))
    except ValueError:
        return
    # A bit of the header that means nothing to a decoder, such as the size of the window of a small frame.
    assert found == content


@needs_zstd
@settings(deadline=None)
@given(data=st.binary(max_size=200), nbytes=st.integers(0, 300))
def test_what_is_no_frame_is_refused(data: bytes, nbytes: int) -> None:
    if data or nbytes:
        with pytest.raises(ValueError):
            unpack(ZstdCodec(1), data, nbytes)


@needs_zstd
@settings(deadline=None)
@given(content=st.sampled_from([b"x", bytes(range(256)), SAMPLE]), kept=st.floats(0, 1, exclude_max=True))
def test_a_frame_that_is_cut_off_is_refused(content: bytes, kept: float) -> None:
    packed = pack(ZstdCodec(1), content)
    with pytest.raises(ValueError):
        unpack(ZstdCodec(1), packed[: int(len(packed) * kept)], len(content))


@needs_zstd
@pytest.mark.parametrize("content", [b"", b"x", SAMPLE], ids=["empty", "one", "many"])
def test_what_comes_after_a_frame_is_refused(content: bytes) -> None:
    tried = ZstdCodec(1)
    packed = pack(tried, content)
    library = zstandard.ZstdCompressor()
    skippable = b"\x50\x2a\x4d\x18" + (3).to_bytes(4, "little") + b"abc"
    for more in (b"\0", b"abc", pack(tried, b"more"), library.compress(b""), skippable):
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


def bomb(claimed: int) -> bytes:
    """A frame that unpacks to 256 MiB of zeros, and says that it were `claimed` bytes."""
    compressor = zstandard.ZstdCompressor(level=1).compressobj(size=256 * MIB)
    zeros = bytes(MIB)
    packed = b"".join([*(compressor.compress(zeros) for _ in range(256)), compressor.flush()])
    size = (256 * MIB).to_bytes(4, "little")
    assert packed[6:10] == size
    packed = packed[:6] + claimed.to_bytes(4, "little") + packed[10:]
    assert zstandard.frame_content_size(packed) == claimed
    return packed


BOMB_PROGRAM = """
import resource, sys
from kvf_codecs.zstd import ZstdCodec
packed, out, codec = memoryview(sys.stdin.buffer.read()), memoryview(bytearray(1 << 20)), ZstdCodec(1)
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


@needs_zstd
@pytest.mark.parametrize("claimed", [256 * MIB, MIB], ids=["that says so", "that lies"])
def test_a_bomb_needs_no_more_memory_than_an_object(claimed: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", BOMB_PROGRAM], input=bomb(claimed), capture_output=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
    assert int(done.stdout) < 16 << 10, "KiB"


@needs_zstd
def test_one_codec_serves_many_threads() -> None:
    """A context that two threads share breaks frames, or the process."""
    tried = ZstdCodec(1)
    threads = 4
    together = threading.Barrier(threads)

    def work(number: int) -> bool:
        content = bytes((number + index) % 251 for index in range(50_000))
        together.wait(30)
        return all(unpack(tried, pack(tried, content), len(content)) == content for _ in range(40))

    with ThreadPoolExecutor(threads) as pool:
        assert list(pool.map(work, range(threads))) == [True] * threads


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
    with pytest.raises(PluginUnavailable, match=r'pip install "kvframework\[zstd\]"'):
        registry.resolve("codec", "zstd")


def test_a_list_of_plugins_imports_no_zstandard() -> None:
    script = (
        "import sys, kvf_codecs\n"
        "none, zstd = kvf_codecs.kvf_codecs()\n"
        "zstd.probe(), none.create(none.options())\n"
        "print('zstandard' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "False"


def test_the_hook_offers_both() -> None:
    providers = {provider.name: provider for provider in hook()}
    assert list(providers) == ["none", "zstd"]
    none = providers["none"]
    assert none.probe() is None
    data = memoryview(SAMPLE)
    assert none.create(none.options()).encode(data) == [data]
