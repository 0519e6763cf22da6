"""The side by side with LMCache's server, as far as it needs no LMCache: a stand-in takes its place."""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
ROOT = Path(__file__).resolve().parents[2]
if not (ROOT / "benchmarks").is_dir():
    pytest.skip("benchmarks/ is not part of a source distribution", allow_module_level=True)
# Behind everything else: the framework under test stays the one that is installed.
sys.path.append(str(ROOT))

from kvframework_bench.console import no_progress  # noqa: E402
from kvframework_bench.errors import WrongBytes  # noqa: E402
from kvframework_bench.lmcache import __main__ as command  # noqa: E402
from kvframework_bench.lmcache.figures import (  # noqa: E402
    Comparison,
    about,
    comparison_panels,
    comparison_tables,
)
from kvframework_bench.lmcache.run import LENGTHS, Setting, compare  # noqa: E402
from kvframework_bench.machine import Load, describe_machine  # noqa: E402
from kvframework_bench.plot import draw  # noqa: E402
from kvframework_bench.workload import Shape  # noqa: E402

pytestmark = pytest.mark.torch
TINY = Shape("tiny", layers=2, heads=1, head_dim=16, tokens=512, target_ratio=0, rounds=1)


class StandIn:
    """Copies blocks within the process; flips one bit of the result over the path that `flips` names."""

    def __init__(self, kv: dict[str, torch.Tensor], way: str, *, flips: bool) -> None:
        self.way = way
        self._kv = kv
        self._flips = flips
        self._stored: dict[str, torch.Tensor] = {}

    def store(self, blocks: Sequence[int]) -> float:
        started = time.perf_counter()
        self._stored = {name: kv[:, list(blocks)].clone() for name, kv in self._kv.items()}
        return time.perf_counter() - started

    def retrieve(self, blocks: Sequence[int]) -> float:
        started = time.perf_counter()
        for name, kv in self._kv.items():
            kv[:, list(blocks)] = self._stored[name]
        if self._flips:
            first = next(iter(self._kv.values())).view(torch.uint8)
            first[0, blocks[0]] ^= 1
        return time.perf_counter() - started

    def lookup(self, tokens: int) -> float:
        return 1e-3


def setting(*, flips: str = "") -> Setting:
    ways: dict[str, str] = {}

    @contextmanager
    def serve(_directory: Path, shared: bool) -> Iterator[SimpleNamespace]:
        endpoint = "shared" if shared else "pickle"
        yield SimpleNamespace(endpoint=endpoint)
        ways[endpoint] = "ended"

    @contextmanager
    def connect(endpoint: str, kv: dict[str, torch.Tensor], _model: str, tokens: Sequence[int]) -> Iterator[StandIn]:
        assert endpoint not in ways
        assert len(tokens) in (TINY.tokens, max(LENGTHS))
        yield StandIn(kv, endpoint, flips=endpoint == flips)

    return Setting(serve, connect, (TINY,), rounds=1, lookup_rounds=1, lookup_calls=1)


def test_both_are_measured_over_both_paths(tmp_path: Path) -> None:
    transfers, lookups = compare(setting(), no_progress)
    assert [(row.path, row.contender, row.way) for row in transfers] == [
        ("arena", "kvframework", "cpu_gather, arena"),
        ("arena", "LMCache", "shared"),
        ("wire", "kvframework", "cpu_gather, wire"),
        ("wire", "LMCache", "pickle"),
    ]
    assert all(row.verified and row.nbytes == TINY.nbytes and row.store.min > 0 for row in transfers)
    names = ["bare echo", "kvframework", "kvframework, hashing included", "LMCache"]
    assert [(row.tokens, row.what) for row in lookups] == [(length, name) for length in LENGTHS for name in names]
    assert all(row.latency.p50_us == 1000 for row in lookups if row.what == "LMCache")
    assert all(row.ratio_to_echo.median == 1 for row in lookups if row.what == "bare echo")

    document = Comparison(
        "command", {"lmcache": "0.5.6"}, True, describe_machine(), Load.of(0, 0, 0), transfers, lookups
    )
    assert about(document).endswith("lmcache 0.5.6")
    assert json.loads(document.as_json())["transfers"][1]["contender"] == "LMCache"
    assert [table.row_count for table in comparison_tables(document, markdown=True)] == [4, 12]
    panels = comparison_panels(document)
    assert [len(panel.bars) for panel in panels if hasattr(panel, "bars")] == [4, 4, 12]
    if importlib.util.find_spec("matplotlib") is not None:
        draw(panels, tmp_path / "side.svg", title="side by side", about=about(document))
        assert "<!-- ratio to plain copy, wire -->" in (tmp_path / "side.svg").read_text()


@pytest.mark.parametrize("path", ["shared", "pickle"])
def test_one_wrong_bit_of_the_peer_ends_it(path: str) -> None:
    with pytest.raises(WrongBytes, match="differ from the stored bytes"):
        compare(setting(flips=path), no_progress)


def test_without_lmcache_it_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "lmcache" else found(name))
    assert command.main(["--quick"]) == 2
    errors = capsys.readouterr().err
    assert "[bench.unavailable] LMCache is not installed" in errors
    assert "benchmarks/kvframework_bench/lmcache/install.sh ENV" in errors
