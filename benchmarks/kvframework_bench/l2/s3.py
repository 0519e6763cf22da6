"""The part `s3`: put and get of the S3 tier next to obstore itself, at a SeaweedFS of the benchmark's own: the rate,
and the processor time of this process, in which both run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from kvf_demo.processes import uninterrupted
from kvframework.api.plugin import ByteSize
from kvframework.api.tier import Outcome, Tier
from kvframework.registry.registry import PluginRegistry
from kvframework_bench.console import Stage
from kvframework_bench.errors import BenchUnavailable
from kvframework_bench.l2.figures import S3Figures, S3Row
from kvframework_bench.l2.s3_reference import AT_ONCE, PIECE_BYTES, BareStore
from kvframework_bench.l2.s3_server import BUCKET, INSTALL_HINT, S3Site, weed_binary
from kvframework_bench.l2.sizes import Sizes
from kvframework_bench.l2.tier import Values, expect, keys_for, open_tier
from kvframework_bench.process import BenchChild
from kvframework_bench.rounds import Case, Rounds, Spread, interleave, percentile, rate_gb_s, ratio, timed

TARGET_RATIO = 0.9
# Processor seconds a GB.
TARGET_PROCESSOR = {"put": 0.35, "get": 0.8}
_START_S = 60.0
_POLL_S = 0.1
_DEADLINE_S = 120.0


def bench_s3(sizes: Sizes, directory: Path, registry: PluginRegistry, stage: Stage) -> S3Figures:
    """Measure the tier. Raises `BenchUnavailable` without SeaweedFS or obstore, `BenchFailed`, and `WrongBytes`."""
    with _running(directory) as site:
        options = {"url": f"s3://{BUCKET}/tier", "endpoint": site.endpoint, "anonymous": True, "concurrency": AT_ONCE}
        with open_tier(registry, "s3", options) as tier, BareStore(site.endpoint) as bare:
            return S3Figures([row for nbytes in sizes.value_bytes for row in _rows(sizes, nbytes, bare, tier, stage)])


@contextmanager
def _running(directory: Path) -> Iterator[S3Site]:
    binary = weed_binary()
    if binary is None:
        raise BenchUnavailable("an S3 server is not installed", hint=INSTALL_HINT)
    site = S3Site(directory)
    with ExitStack() as stack:
        with uninterrupted():
            weed = stack.enter_context(BenchChild("weed", site.command(binary), directory))
        deadline = time.monotonic() + _START_S
        while not site.takes_values():
            weed.check_alive()
            if time.monotonic() > deadline:
                raise weed.failure(f"does not store values within {_START_S:.0f} s")
            time.sleep(_POLL_S)
        yield site


def _rows(sizes: Sizes, nbytes: int, bare: BareStore, tier: Tier, stage: Stage) -> list[S3Row]:
    values = Values(nbytes, max(sizes.call_bytes // nbytes, 1))
    keys = keys_for(len(values.sources), b"t")
    deadline = time.monotonic() + _DEADLINE_S
    sources, targets = [[each] for each in values.sources], [[each] for each in values.targets]
    used: dict[str, list[float]] = {}
    ways: dict[str, Case] = {
        "put": lambda: timed(lambda: expect(tier.put(keys, sources, deadline=deadline), Outcome.STORED)),
        "get": lambda: timed(lambda: expect(tier.get_into(keys, targets, deadline=deadline), Outcome.FOUND)),
        "bare put": lambda: timed(partial(bare.put, values.sources)),
        "bare get, whole": lambda: timed(partial(bare.get, values.targets, None)),
        "bare get, in pieces": lambda: timed(partial(bare.get, values.targets, PIECE_BYTES)),
    }
    for way in ("put", "bare put"):
        ways[way]()
    with stage(f"values of {ByteSize(nbytes)} in S3", sizes.s3_rounds) as advance:
        for way in ("get", "bare get, whole", "bare get, in pieces"):
            values.poison()
            ways[way]()
            values.verify(way)
        cases = {way: _noting(used.setdefault(way, []), values.total, case) for way, case in ways.items()}
        measured = interleave(cases, rounds=sizes.s3_rounds, advance=advance)
    references = {"put": ["bare put"], "get": ["bare get, whole", "bare get, in pieces"]}
    return [_row(operation, values, measured, used, among) for operation, among in references.items()]


def _noting(used: list[float], nbytes: int, case: Case) -> Case:
    """The case, with this process's processor seconds a GB appended to `used`."""

    def run() -> float:
        began = time.process_time()
        seconds = case()
        used.append((time.process_time() - began) / nbytes * 1e9)
        return seconds

    return run


def _row(
    operation: str,
    values: Values,
    measured: dict[str, list[list[float]]],
    used: dict[str, list[float]],
    among: list[str],
) -> S3Row:
    reference = min(among, key=lambda way: _middle(measured[way]))
    return S3Row(
        operation=operation,
        value_bytes=values.nbytes,
        nbytes=values.total,
        reference=reference,
        reference_gb_s=rate_gb_s(values.total, measured[reference]),
        tier_gb_s=rate_gb_s(values.total, measured[operation]),
        ratio_to_reference=ratio(measured[reference], measured[operation]),
        reference_processor_s=Spread.of(used[reference]),
        tier_processor_s=Spread.of(used[operation]),
        target_ratio=TARGET_RATIO,
        target_processor_s=TARGET_PROCESSOR[operation],
    )


def _middle(rounds: Rounds) -> float:
    return percentile(sorted(second for samples in rounds for second in samples), 0.5)
