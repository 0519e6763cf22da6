"""Copies of objects' bytes: right, refused where they cannot be, and seen half done by another thread.

A thread that runs while bytes are copied finds memory of which some quarters have changed and others have not. No
thread runs while the interpreter is held, so none finds that.
"""

from __future__ import annotations

import mmap
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from kvf_codecs import NoneCodec
from kvframework.api import copying
from kvframework.api.copying import copy_bytes, copy_past_caches, joined
from kvframework.api.plugin import Buffer

Copy = Callable[[memoryview, Buffer], None]

SIZE = 256 << 20
TRIES = 20


@pytest.fixture(scope="module")
def memory() -> Iterator[tuple[memoryview, memoryview]]:
    """Two pieces of memory of `SIZE` bytes: zeros, and ones."""
    with mmap.mmap(-1, SIZE) as target, mmap.mmap(-1, SIZE) as source:
        source.write(b"\1" * SIZE)
        with memoryview(target) as here, memoryview(source) as there:
            yield here, there


@contextmanager
def watched(target: memoryview) -> Iterator[list[bytes]]:
    """The half-full states of `target` that another thread sees."""
    seen: list[bytes] = []
    started, ended = threading.Event(), threading.Event()

    def watch() -> None:
        while not ended.is_set():
            quarters = bytes(target[SIZE // 8 :: SIZE // 4])
            if len(set(quarters)) > 1:
                seen.append(quarters)
            started.set()

    thread = threading.Thread(target=watch)
    thread.start()
    started.wait()
    try:
        yield seen
    finally:
        ended.set()
        thread.join()


def seen_half_done(memory: tuple[memoryview, memoryview], copy: Callable[[memoryview, memoryview], None]) -> bool:
    """Whether one of some copies was: a busy machine may run the other thread before and after one only."""
    target, source = memory
    zeros = mmap.mmap(-1, SIZE)
    try:
        for _ in range(TRIES):
            copy_bytes(target, zeros)
            with watched(target) as seen:
                copy(target, source)
            assert target[0] == target[SIZE - 1] == 1
            if seen:
                return True
    finally:
        zeros.close()
    return False


COPIES = pytest.mark.parametrize("copy", [copy_bytes, copy_past_caches])


@COPIES
def test_other_threads_run_while_256_mib_are_copied(memory: tuple[memoryview, memoryview], copy: Copy) -> None:
    assert seen_half_done(memory, copy)


def test_the_codec_that_packs_nothing_copies_so(memory: tuple[memoryview, memoryview]) -> None:
    assert seen_half_done(memory, lambda target, source: NoneCodec().decode_into(source, target))


def test_zstd_unpacks_so(memory: tuple[memoryview, memoryview]) -> None:
    pytest.importorskip("zstandard", reason="zstandard not installed")
    from kvf_codecs.zstd import ZstdCodec

    codec = ZstdCodec(1)
    (packed,) = codec.encode(memory[1])
    assert seen_half_done(memory, lambda target, _: codec.decode_into(packed, target))


def test_planes_are_merged_so(memory: tuple[memoryview, memoryview]) -> None:
    pytest.importorskip("zstandard", reason="zstandard not installed")
    from kvf_codecs.planes import PlanesCodec

    codec = PlanesCodec()
    (packed,) = codec.encode(memory[1])
    assert seen_half_done(memory, lambda target, _: codec.decode_into(packed, target))


def test_a_slice_assignment_would_be_found(memory: tuple[memoryview, memoryview]) -> None:
    def assign(target: memoryview, source: memoryview) -> None:
        target[:] = source

    assert not seen_half_done(memory, assign)


def test_joined_bytes_are_those_of_the_parts() -> None:
    for sizes in ([], [0], [3, 0, 5], [1 << 20, 0, 7, 1 << 16]):
        parts = [random.Random(size).randbytes(size) for size in sizes]
        views = [memoryview(bytearray(part)) for part in parts]
        found = joined(views)
        assert (found.format, found.ndim, found) == ("B", 1, b"".join(parts))
        for view in views:
            if view.nbytes:
                view[0] ^= 1
        assert found == b"".join(parts)


@pytest.mark.parametrize("source", [b"abc", bytearray(b"abc"), memoryview(b"xabcx")[1:4], memoryview(b"abc")])
@COPIES
def test_any_contiguous_bytes_are_a_source(source: bytes, copy: Copy) -> None:
    target = bytearray(b"....")
    copy(memoryview(target)[1:], source)
    assert target == b".abc"


@COPIES
def test_nothing_is_written_where_it_cannot_be(copy: Copy) -> None:
    target = memoryview(bytearray(4))
    with pytest.raises(ValueError, match="has 3 bytes, the target 4"):
        copy(target, b"abc")
    for wrong, source in ((memoryview(b"abcd"), b"1234"), (target[::2], b"12"), (target[:2], memoryview(b"1234")[::2])):
        with pytest.raises(BufferError):
            copy(wrong, source)
    assert target == bytes(4)


@COPIES
def test_memory_is_borrowed_for_the_call_only(copy: Copy) -> None:
    target = bytearray(3)
    copy(memoryview(target), b"abc")
    target.extend(b"more")  # a BufferError while a view is held
    assert target == b"abcmore"


@pytest.mark.parametrize("kernel", [True, False], ids=["as built", "memmove"])
@pytest.mark.parametrize("nbytes", [0, 1, copying._MUCH - 1, copying._MUCH, copying._MUCH + 200])
def test_much_is_copied_past_the_caches_from_anywhere_to_anywhere(
    nbytes: int, kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not kernel:
        monkeypatch.setattr(copying, "_LIBRARY", copying._LIBRARY.with_name("none.so"))
        monkeypatch.setattr(copying, "_streaming", copying._streaming.__wrapped__)
    content = random.Random(nbytes).randbytes(nbytes)
    for begin in (0, 1, 31, 63, 64):
        target = bytearray(nbytes + 130)
        with memoryview(target) as whole, memoryview(b"x" * (begin // 2) + content) as source:
            copy_past_caches(whole[begin : begin + nbytes], source[begin // 2 :])
        assert target == bytes(begin) + content + bytes(130 - begin)


def test_ranges_that_overlap_are_copied_right() -> None:
    content = random.Random(1).randbytes(2 * copying._MUCH)
    for to, origin in ((100, 0), (0, 100)):
        memory = bytearray(content)
        with memoryview(memory) as whole:
            copy_past_caches(whole[to : to + copying._MUCH], whole[origin : origin + copying._MUCH])
        assert memory[to : to + copying._MUCH] == content[origin : origin + copying._MUCH]
