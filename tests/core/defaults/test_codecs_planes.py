"""The codec `planes`: one form by both kernels, what shrinks and what does not, and hostile packed bytes."""

from __future__ import annotations

import random
import struct
import sys
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvf_codecs import plane_kernel
from kvf_codecs.plane_kernel import NativeKernel, NumpyKernel, PlaneKernel, load_kernel
from kvf_dev.testing import CodecConformance
from kvframework.api.plugin import DTYPE_BYTES
from kvframework.errors import PluginUnavailable
from kvframework.registry.registry import PluginRegistry
from tests.core.defaults.test_codecs import bomb, kib_taken_in_vain, unpack

zstandard = pytest.importorskip("zstandard", reason="zstandard is not installed")

from kvf_codecs.planes import (  # noqa: E402
    HEADER_BYTES,
    PIECE,
    PlanesCodec,
)

MIB = 1 << 20
_HAS_NUMPY = plane_kernel.find_spec("numpy") is not None
_HAS_LIBRARY = plane_kernel._library() is not None
needs_numpy = pytest.mark.skipif(not _HAS_NUMPY, reason="numpy is not installed")
needs_library = pytest.mark.skipif(
    not _HAS_LIBRARY, reason="the plane kernel was not built: no C compiler at build time"
)
pytestmark = pytest.mark.skipif(not (_HAS_NUMPY or _HAS_LIBRARY), reason="neither the plane kernel nor numpy is there")
DTYPES = ["", *DTYPE_BYTES]
dtypes = st.sampled_from(DTYPES)
# Few of the objects of chance are as long as a piece.
objects = st.binary(max_size=3000) | st.builds(
    lambda seed, nbytes, values: random.Random(seed).choices(range(values), k=nbytes),
    st.integers(0, 9),
    st.integers(0, 70_000),
    st.sampled_from([1, 5, 40, 256]),
).map(bytes)


def numbers(count: int, seed: int = 1) -> bytes:
    """`count` numbers in bfloat16, as KV has them: few exponents, and mantissas that are noise. They come again after
    65536."""
    chance = random.Random(seed)
    scales = [chance.lognormvariate(0, 0.5) for _ in range(64)]
    many = b"".join(struct.pack("<f", chance.gauss(0, scales[at % 64]))[2:] for at in range(min(count, 1 << 16)))
    return (many * (count * 2 // len(many) + 1))[: 2 * count] if count else b""


def pack(codec: PlanesCodec, data: bytes, dtype: str = "") -> bytes:
    return b"".join(codec.encode_elements(memoryview(data), dtype))


def forged(packed: bytes, at: int, form: str, *values: int) -> bytes:
    changed = bytearray(packed)
    struct.pack_into(form, changed, at, *values)
    return bytes(changed)


class TestPlanes(CodecConformance):
    """By the kernel that is there; the other one makes the same bytes."""

    use = "planes"


@needs_library
@needs_numpy
@given(objects, dtypes)
@example(b"", "bfloat16")
@example(b"x", "float64")
def test_both_kernels_make_one_form(data: bytes, dtype: str) -> None:
    native, numpy = PlanesCodec(load_kernel()), PlanesCodec(NumpyKernel())
    packed = pack(native, data, dtype)
    assert pack(numpy, data, dtype) == packed
    assert unpack(numpy, packed, len(data)) == unpack(native, packed, len(data)) == data
    assert len(packed) <= len(data) + 64


@needs_library
@needs_numpy
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("beyond", [0, 1, -1, 7])
def test_both_kernels_make_one_form_of_pieces(dtype: str, beyond: int) -> None:
    data = numbers(PIECE * DTYPE_BYTES[dtype] + 4)[: 2 * PIECE * DTYPE_BYTES[dtype] + beyond]
    native, numpy = PlanesCodec(load_kernel()), PlanesCodec(NumpyKernel())
    packed = pack(native, data, dtype)
    assert pack(numpy, data, dtype) == packed
    assert len(packed) < len(data)
    assert unpack(numpy, packed, len(data)) == unpack(native, packed, len(data)) == data


@pytest.mark.parametrize("kernel", ["native", "numpy"])
@given(data=st.binary(max_size=2000), width=st.sampled_from([1, 2, 3, 4, 8]))
def test_a_kernel_splits_and_merges(kernel: str, data: bytes, width: int) -> None:
    made = kernel_of(kernel)
    count = len(data) // width
    data = data[: count * width]
    planes = [memoryview(bytearray(count)) for _ in range(width)]
    made.split(memoryview(data), planes)
    assert [bytes(plane) for plane in planes] == [data[index::width] for index in range(width)]
    merged = memoryview(bytearray(len(data)))
    made.merge(planes, merged)
    assert merged == data


@pytest.mark.parametrize("kernel", ["native", "numpy"])
def test_a_kernel_refuses_planes_of_another_length(kernel: str) -> None:
    made = kernel_of(kernel)
    data = memoryview(bytearray(8))
    for lengths in ((4, 3), (4, 5), (8, 8)):
        planes = [memoryview(bytearray(length)) for length in lengths]
        with pytest.raises(ValueError, match="the object 8"):
            made.split(data, planes)
        with pytest.raises(ValueError, match="the object 8"):
            made.merge(planes, data)


def kernel_of(name: str) -> PlaneKernel:
    if name == "numpy":
        return NumpyKernel() if _HAS_NUMPY else pytest.skip("numpy is not installed")
    made = load_kernel()
    return made if isinstance(made, NativeKernel) else pytest.skip("the compiled plane kernel is missing, and numpy is")


def test_numbers_of_two_bytes_shrink_by_their_exponents() -> None:
    """To less than Zstandard alone makes of them, whether or not their dtype is told."""
    codec, data = PlanesCodec(), numbers(1 << 16)
    told = pack(codec, data, "bfloat16")
    assert len(told) < 0.7 * len(data) < 0.95 * len(zstandard.ZstdCompressor(level=1).compress(data))
    assert pack(codec, data) == told
    # The layout may be wrong, too: then it is a matter of size alone.
    wrong = pack(codec, data, "float8_e4m3fn")
    assert len(told) < len(wrong) < len(data)
    assert unpack(codec, wrong, len(data)) == data


def test_numbers_of_four_bytes_shrink_by_their_exponents() -> None:
    chance = random.Random(2)
    codec, data = PlanesCodec(), struct.pack(f"<{1 << 16}f", *(chance.gauss(0, 1) for _ in range(1 << 16)))
    told = pack(codec, data, "float32")
    assert len(told) < 0.88 * len(data)
    assert pack(codec, data) == told


def test_what_does_not_shrink_is_not_copied() -> None:
    data = memoryview(random.Random(3).randbytes(MIB + 1))
    for dtype in DTYPES:
        header, body = PlanesCodec().encode_elements(data, dtype)
        assert header.nbytes == HEADER_BYTES <= 64
        assert body is data


def test_a_layer_of_zeros_beside_noise_shrinks() -> None:
    """Each piece of each plane is held in the way that is shorter."""
    codec, data = PlanesCodec(), random.Random(4).randbytes(2 * MIB) + bytes(2 * MIB)
    for dtype in DTYPES:
        packed = pack(codec, data, dtype)
        assert len(packed) < len(data) // 2 + 4096
        assert unpack(codec, packed, len(data)) == data


def in_planes() -> tuple[bytes, bytes]:
    """An object and its packed form: two planes, the second of which is a frame."""
    data = numbers(20_000)
    packed = pack(PlanesCodec(), data, "bfloat16")
    assert packed[1] == 2
    assert struct.unpack_from("<I", packed, HEADER_BYTES) == (20_000,)
    return data, packed


def test_a_header_that_claims_what_is_not_there_is_refused() -> None:
    data, packed = in_planes()
    frame = struct.unpack_from("<I", packed, HEADER_BYTES + 4)[0]
    for damaged, problem in (
        (forged(packed, 0, "B", 2), "the packed form has version 2, expected 1"),
        (forged(packed, 1, "B", 3), "the elements have 3 bytes, expected 1, 2, 4, 8"),
        (forged(packed, 5, "B", 1), "the elements have 2 bytes"),
        (forged(packed, 8, "<Q", 1 << 62), "the packed object has 4611686018427387904 bytes, expected 40000"),
        (forged(packed, 16, "<Q", 0), "another checksum"),
        (forged(packed, HEADER_BYTES, "<II", 0xFFFF_FFFF, 0xFFFF_FFFF), "the packed form has .* bytes, expected"),
        (
            forged(packed, HEADER_BYTES, "<II", 20_001, frame - 1),
            "a packed plane has 20001 bytes, expected at most 20000",
        ),
        (forged(packed, HEADER_BYTES, "<II", 19_999, frame + 1), "the Zstandard frame is damaged:|a plane has"),
        (packed[:HEADER_BYTES], "its table ends at byte 32"),
        (packed[:-1], f"has {len(packed) - 1} bytes, expected {len(packed)}"),
        (packed + b"x", f"has {len(packed) + 1} bytes, expected {len(packed)}"),
        (b"", "has 0 bytes, fewer than its header of 24"),
    ):
        with pytest.raises(ValueError, match=problem):
            unpack(PlanesCodec(), damaged, len(data))


def test_frames_of_another_size_are_refused() -> None:
    """Even where they would fill the plane: no frame is unpacked before its size is that of the plane."""
    data, packed = in_planes()
    start = HEADER_BYTES + 8 + 20_000
    for frame in (
        zstandard.ZstdCompressor().compress(bytes(20_001)),
        zstandard.ZstdCompressor().compress(bytes(19_999)),
        zstandard.ZstdCompressor(write_content_size=False).compress(bytes(20_000)),
        zstandard.ZstdCompressor().compress(bytes(10_000)) * 2,
        zstandard.ZstdCompressor().compress(bytes(20_000)) + b"more",
        b"\x50\x2a\x4d\x18" + (3).to_bytes(4, "little") + b"abc",
    ):
        changed = forged(packed[:start] + frame, HEADER_BYTES + 4, "<I", len(frame))
        with pytest.raises(ValueError, match=r"Zstandard frame|a plane has"):
            unpack(PlanesCodec(), changed, len(data))


def test_a_frame_that_is_longer_than_its_plane_is_refused() -> None:
    """As one with a flood of empty blocks: packing makes none, and unpacking takes as long as the frame is."""
    data, packed = in_planes()
    start = HEADER_BYTES + 8 + 20_000
    header = zstandard.frame_header_size(packed[start:])
    flood = packed[start : start + header] + bytes(3) * 7000 + packed[start + header :]
    assert zstandard.ZstdDecompressor().decompress(flood, allow_extra_data=False) == data[1::2]
    changed = forged(packed[:start] + flood, HEADER_BYTES + 4, "<I", len(flood))
    with pytest.raises(ValueError, match=f"a packed plane has {len(flood)} bytes, expected at most 20000"):
        unpack(PlanesCodec(), changed, len(data))


@pytest.mark.parametrize("claimed", [256 * MIB, 1 << 16], ids=["that says so", "that lies"])
def test_a_bomb_needs_no_more_memory_than_a_piece(claimed: int) -> None:
    """An object of 64 KiB, in 1-byte elements."""
    frame = bomb(claimed)
    packed = struct.pack("<BB6xQQI", 1, 1, 1 << 16, 0, len(frame)) + frame
    assert kib_taken_in_vain(PlanesCodec, packed, 1 << 16) < 8 << 10


@given(st.binary(max_size=200), st.sampled_from([0, 1, 24, 200, 40_000]))
def test_bytes_of_strangers_are_refused(packed: bytes, nbytes: int) -> None:
    for start in (b"", struct.pack("<BB6xQ", 1, 2, nbytes), struct.pack("<BB6xQ", 1, 0, nbytes)):
        with pytest.raises(ValueError):
            unpack(PlanesCodec(), start + packed, nbytes)


def test_without_zstandard_or_any_kernel_the_codec_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = PluginRegistry()
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "zstandard", None)
        with pytest.raises(PluginUnavailable, match=r"zstandard is not installed"):
            registry.resolve("codec", "planes")
    monkeypatch.setattr(plane_kernel, "_library", lambda: None)
    monkeypatch.setattr(plane_kernel, "find_spec", lambda _name: None)
    with pytest.raises(PluginUnavailable, match="numpy is not installed: pip install numpy"):
        registry.resolve("codec", "planes")


@needs_numpy
def test_without_a_library_numpy_splits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(plane_kernel, "_LIBRARY", tmp_path / "none.so")
    monkeypatch.setattr(plane_kernel, "_library", plane_kernel._library.__wrapped__)
    assert isinstance(load_kernel(), NumpyKernel)


@needs_library
def test_a_library_of_another_version_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(plane_kernel, "_ABI", 99)
    assert plane_kernel._library.__wrapped__() is None
    assert "has version 1, expected 99; until it is rebuilt" in caplog.text
