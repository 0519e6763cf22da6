"""The part `storing`: LOOKUP of a prefix in L1, while another client stores new prompts at full speed.

Lookups need no tensors; the other client is an engine in a separate process, which needs torch.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from kvframework.client import RequestHashes, SchedulerAdapter
from kvframework.registry.registry import PluginRegistry
from kvframework_bench.console import Stage
from kvframework_bench.contention.figures import StoringFigures, StoringLookup
from kvframework_bench.contention.sizes import STORING_P99_RATIO, Sizes
from kvframework_bench.contention.storing_client import Start, running_storing_client
from kvframework_bench.errors import BenchFailed, require_torch
from kvframework_bench.prefix import Prefixes, lookup_case, token_ids
from kvframework_bench.rounds import Case, Latency, Rounds, Spread, measure_quiet_and_disturbed, ratio
from kvframework_bench.server import running_server, status
from kvframework_bench.workload import TransferPath, transport_options

# Room in L1 for the prompt of the lookups, and beside it.
_ARENA_SLACK = 8 << 20


def bench_storing(sizes: Sizes, directory: Path, registry: PluginRegistry, stage: Stage) -> StoringFigures:
    """Measure lookups. Raises `BenchUnavailable` without torch, and `BenchFailed`, also if a lookup is wrong or nothing
    was stored."""
    require_torch()
    options = transport_options(TransferPath.arena, registry)
    capacity = sizes.storing.nbytes * sizes.storing_prompts + _ARENA_SLACK
    with ExitStack() as stack:
        server = stack.enter_context(running_server(directory, capacity))
        client = stack.enter_context(server.client())
        prefixes = Prefixes(client)
        longest = prefixes.request(token_ids(max(sizes.lookup_tokens), known=True))
        prefixes.store(longest)
        pin = _Pin(prefixes.scheduler(), longest)
        # More than L1 has room for: from then on every store evicts, and all of the arena is mapped there.
        start = Start(server.endpoint, sizes.storing, options, warm_up=capacity // sizes.storing.nbytes + 1)
        storing = stack.enter_context(running_storing_client(directory, start))
        cases: dict[str, Case] = {}
        for tokens in sizes.lookup_tokens:
            request = prefixes.request(token_ids(tokens, known=True))
            cases[_name(tokens)] = lookup_case(prefixes.scheduler(), request, tokens)
        for case in cases.values():
            case()
        with stage("looking up during stores", sizes.lookup_rounds) as advance:
            quiet, disturbed = measure_quiet_and_disturbed(
                storing,
                cases,
                rounds=sizes.lookup_rounds,
                calls=sizes.lookup_calls,
                advance=partial(_end_round, pin, advance),
            )
        if not status(client)["l1"]["evictions"]:
            raise BenchFailed("the storing client's stores evicted no object from L1")
    return StoringFigures(
        shape=sizes.storing.name,
        prompt_bytes=sizes.storing.nbytes,
        stores=Spread.of([each.stores for each in storing.stored]),
        gb_s=Spread.of([each.stores * sizes.storing.nbytes / each.seconds / 1e9 for each in storing.stored]),
        lookups=[_row(tokens, quiet[_name(tokens)], disturbed[_name(tokens)]) for tokens in sizes.lookup_tokens],
    )


def _row(tokens: int, quiet: Rounds, disturbed: Rounds) -> StoringLookup:
    alone, storing = Latency.of(quiet), Latency.of(disturbed)
    return StoringLookup(
        tokens=tokens,
        quiet=alone,
        storing=storing,
        p50_ratio=ratio(disturbed, quiet),
        p99_ratio=storing.p99_us / alone.p99_us,
        target_ratio=STORING_P99_RATIO,
    )


def _name(tokens: int) -> str:
    return f"LOOKUP of {tokens} tokens"


def _end_round(pin: _Pin, advance: Callable[[], None]) -> None:
    pin.renew()
    advance()


class _Pin:
    """A ticket that keeps the looked-up prompt in L1 against all stores. Its time ends, so it is renewed."""

    def __init__(self, scheduler: SchedulerAdapter, request: RequestHashes) -> None:
        self._scheduler = scheduler
        self._request = request
        self._result = scheduler.lookup(request)

    def renew(self) -> None:
        before, self._result = self._result, self._scheduler.lookup(self._request)
        self._scheduler.free(before)
