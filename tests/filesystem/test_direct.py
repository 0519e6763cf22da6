"""The filesystem tier's large values: past the page cache and through it, from any memory into any other."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from kvf_filesystem import root as root_module
from kvf_filesystem.form import LARGE, PAGE
from kvf_filesystem.reading import SLICE_BYTES, move
from kvframework.api.tier import Outcome
from kvframework.errors import ConfigFieldError
from kvframework.storage.namespaces import HEADER_BYTES
from tests.filesystem.folder import file_of, fresh_key, get, open_files, open_tier, put, soon, used
from tests.support.received import outcomes_of

FOUND, STORED = Outcome.FOUND, Outcome.STORED


def bypasses_cache(folder: Path) -> bool:
    folder.mkdir(exist_ok=True)
    fd = os.open(folder, os.O_RDONLY)
    try:
        return root_module._can_bypass_cache(fd)
    finally:
        os.close(fd)


def is_cached(path: Path) -> bool:
    """Whether the page cache holds what lies in the middle of a file. mincore(2) reads nothing: a read that may not
    wait (RWF_NOWAIT) starts to read ahead, and finds on a fast disk what it brought itself."""
    libc = ctypes.CDLL(None, use_errno=True)
    resident = (ctypes.c_ubyte * 1)()
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
        middle = len(mapped) // 2 // PAGE * PAGE
        page = ctypes.c_char.from_buffer(mapped, middle)
        answer = libc.mincore(ctypes.c_void_p(ctypes.addressof(page)), ctypes.c_size_t(PAGE), resident)
        del page
    assert answer == 0, os.strerror(ctypes.get_errno())
    return bool(resident[0] & 1)


@pytest.fixture(scope="module")
def arena() -> Iterator[memoryview]:
    """Memory on a page boundary, as the arena's is; nothing in it repeats within a page."""
    segment = mmap.mmap(-1, 5 << 20)
    segment[:] = os.urandom(5 << 20)
    view = memoryview(segment)
    yield view
    view.release()
    segment.close()


@pytest.mark.parametrize(
    ("table", "cached_by_put", "cached_by_get"),
    [
        ({"direct": "on"}, False, False),
        ({"direct": "on", "shared": True}, False, False),
        ({"direct": "auto"}, False, True),
        ({"direct": "auto", "shared": True}, True, True),
        ({"direct": "off"}, True, True),
    ],
)
def test_which_values_bypass_the_page_cache(
    tmp_path: Path, arena: memoryview, table: dict[str, object], cached_by_put: bool, cached_by_get: bool
) -> None:
    if not (bypasses_cache(tmp_path) and os.major(tmp_path.stat().st_dev)):
        pytest.skip("the file system of the temporary folder knows no O_DIRECT, or is a page cache itself")
    tier, key, other, nbytes = open_tier(tmp_path, **table), fresh_key(), fresh_key(), 4 << 20
    header, found, value = os.urandom(HEADER_BYTES), bytearray(HEADER_BYTES), bytes(arena[:nbytes])
    parts = [memoryview(header), arena[:nbytes]]
    assert tier.put([key, other], [parts, parts], deadline=soon()) == [STORED, STORED]
    assert is_cached(file_of(tmp_path, other)) is cached_by_put
    arena[:nbytes] = bytes(nbytes)
    assert tier.get_into([key], [[memoryview(found), arena[:nbytes]]], deadline=soon()) == [len(found) + nbytes]
    assert arena[:nbytes] == value
    assert found == header
    assert is_cached(file_of(tmp_path, key)) is cached_by_get


@settings(
    max_examples=40,
    phases=[Phase.explicit, Phase.generate],  # shrinking would take minutes
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    lead=st.lists(st.sampled_from([0, 1, 16, 80, 4080, 4095]), max_size=3),
    nbytes=st.sampled_from([LARGE - 1, LARGE, LARGE + 1, LARGE + PAGE, LARGE + 4095, 2 * LARGE]),
    cut=st.sampled_from([0, 0, PAGE, PAGE + 1, LARGE // 2]),
    shift=st.sampled_from([0, 0, 1, PAGE]),
    spare=st.sampled_from([0, 0, 1, 5000]),
    other_lead=st.sampled_from([0, 0, 0, 81]),
    modes=st.tuples(st.sampled_from(["off", "on"]), st.sampled_from(["off", "on"])),
)
@example([80], LARGE + 1, 0, 0, 5000, 0, ("on", "on"))
@example([80], LARGE + 1, 0, 0, 0, 81, ("off", "on"))
def test_every_way_of_writing_is_read_by_every_way_of_reading(
    tmp_path: Path,
    arena: memoryview,
    lead: list[int],
    nbytes: int,
    cut: int,
    shift: int,
    spare: int,
    other_lead: int,
    modes: tuple[str, str],
) -> None:
    """Parts small and large, on a page boundary and not, more room than needed, cut in other places when read."""
    if not bypasses_cache(tmp_path / "tried"):
        modes = ("off", "off")
    folder, key = tmp_path / "kv", fresh_key()
    body = arena[shift : shift + nbytes]
    parts = [memoryview(os.urandom(size)) for size in lead] + [body[:cut], body[cut:]]
    writer = open_tier(folder, direct=modes[0], shared=True)
    assert writer.put([key], [parts], deadline=soon()) == [STORED]
    writer.close()
    value = b"".join(parts)
    with mmap.mmap(-1, len(value) + spare + PAGE) as segment, memoryview(segment) as target:
        first = bytearray(other_lead or sum(lead))
        rest = target[: len(value) + spare - len(first)]
        reader = open_tier(folder, direct=modes[1], shared=True)
        assert outcomes_of(reader.get_into([key], [[memoryview(first), rest]], deadline=soon())) == [FOUND]
        found = (bytes(first) + bytes(rest))[: len(value)]
        rest.release()
        assert found == value
        assert reader.delete([key], deadline=soon()) == [Outcome.DELETED]
        reader.close()


def test_a_value_longer_than_a_slice_comes_back(tmp_path: Path) -> None:
    tier, key = open_tier(tmp_path), fresh_key()
    value = os.urandom(1 << 20) * 17 + b"end"
    assert len(value) > 2 * SLICE_BYTES
    assert put(tier, key, value) is STORED
    assert get(tier, key, len(value)) == (FOUND, value)
    assert used(tier) == len(value)


def test_a_file_system_that_cannot_do_it_is_used_through_the_cache(
    tmp_path: Path, arena: memoryview, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(root_module, "_can_bypass_cache", lambda _fd: False)
    with pytest.raises(ConfigFieldError, match="bypass the page cache"):
        open_tier(tmp_path, direct="on")
    assert open_files(tmp_path) == []
    tier, key = open_tier(tmp_path), fresh_key()
    assert tier.put([key], [[arena]], deadline=soon()) == [STORED]
    assert get(tier, key, arena.nbytes) == (FOUND, bytes(arena))


def test_a_refusal_in_the_middle_is_made_good_through_the_cache(
    tmp_path: Path, arena: memoryview, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a file system that takes the flag, but not this alignment."""
    monkeypatch.setattr("kvf_filesystem.root._can_bypass_cache", lambda _fd: True)

    def refuse(operation: Callable[..., int], fd: int, *args: Any, **options: Any) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return move(operation, fd, *args, **options)

    for module in ("reading", "tier"):
        monkeypatch.setattr(f"kvf_filesystem.{module}.move", refuse)
    tier, key = open_tier(tmp_path, direct="on"), fresh_key()
    assert tier.put([key], [[arena]], deadline=soon()) == [STORED]
    assert get(tier, key, arena.nbytes) == (FOUND, bytes(arena))
