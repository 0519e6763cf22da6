"""`kvframework stats`: what the cache has saved, on one screen; and the three lines of it that `run` ends with."""

from __future__ import annotations

from contextlib import closing
from typing import Annotated

import msgspec
import typer

from kvframework.api.command import AsJson, Endpoint, EndpointConfig, examples
from kvframework.api.console import print_document, print_text, short_count, short_duration
from kvframework.api.plugin import ByteSize
from kvframework.client import StatusSource, quiet_connection, server_endpoint
from kvframework.status import REASONS, LastHour, Lookups, Status

app = typer.Typer()


class Stats(msgspec.Struct, frozen=True):
    """What the server has answered since its start, and in the last hour. `l1_tokens` and `l2_tokens` are the tokens
    found by source. `prefill_saved_s` is an estimate: the time in which the engines would have computed the tokens
    found, at the speed that they report."""

    endpoint: str
    uptime_s: float
    lookups: int
    asked_tokens: int
    hit_tokens: int
    l1_tokens: int
    l2_tokens: int
    prefill_saved_s: float
    last_hour: LastHour
    l1_used_bytes: int
    l1_capacity_bytes: int
    engines: int
    misses: dict[str, int]
    most_frequent_miss: str


def stats_of(status: Status) -> Stats:
    """Return the numbers of a status document. Pure."""
    lookups: Lookups = status.lookups
    misses = {reason: count for reason, count in lookups.misses.items() if count}
    most = max(misses, key=lambda reason: misses[reason], default="")
    models = lookups.by_model.values()
    return Stats(
        status.server.endpoint,
        status.server.uptime_s,
        lookups.lookups,
        lookups.asked_tokens,
        lookups.hit_tokens,
        sum(each.l1_tokens for each in models),
        sum(each.l2_tokens for each in models),
        lookups.prefill_saved_s,
        lookups.last_hour,
        status.l1.used_bytes,
        status.l1.capacity_bytes,
        len({each.pid for each in status.instances}),
        misses,
        f"{most}: {REASONS[most]}" if most in REASONS else most,
    )


def summary(stats: Stats) -> list[str]:
    """Return three lines. Pure."""
    found, asked = _share(stats.hit_tokens, stats.asked_tokens), short_count(stats.asked_tokens)
    return [
        f"{found} of {asked} prompt tokens were found in {stats.lookups} lookups",
        f"prefill saved, estimated: {_saved(stats.prefill_saved_s, stats.hit_tokens)}",
        f"L1: {ByteSize(stats.l1_used_bytes)} of {ByteSize(stats.l1_capacity_bytes)} in use",
    ]


def read_stats(endpoint: str, timeout_s: float = 3.0) -> Stats:
    """Ask the server. Blocks for `timeout_s` at most. Raises `KVFrameworkError`."""
    quiet_connection()
    with closing(StatusSource(endpoint, timeout_s, name="stats")) as source:
        return stats_of(msgspec.json.decode(source.ask(), type=Status))


@app.command("stats", epilog=examples("kvframework stats", "kvframework stats --json | jq .prefill_saved_s"))
def stats(
    endpoint: Endpoint = None,
    config: EndpointConfig = None,
    timeout: Annotated[float, typer.Option(min=0.01, max=3600, help="Seconds to wait for the server.")] = 3.0,
    as_json: AsJson = False,
) -> None:
    """Show what the cache has saved since the server's start, and in the last hour."""
    found = read_stats(server_endpoint(endpoint, config), timeout)
    if as_json:
        print_document(msgspec.structs.asdict(found))
        return
    for line in _screen(found):
        print_text(line)


def _screen(found: Stats) -> list[str]:
    hour = found.last_hour
    rows: list[tuple[str, str, str]] = [
        ("", "since the start", "last hour"),
        ("lookups", short_count(found.lookups), short_count(hour.lookups)),
        ("prompt tokens", short_count(found.asked_tokens), short_count(hour.asked_tokens)),
        ("found", _share(found.hit_tokens, found.asked_tokens), _share(hour.hit_tokens, hour.asked_tokens)),
        ("  in L1", short_count(found.l1_tokens), ""),
        ("  in L2", short_count(found.l2_tokens), ""),
        (
            "prefill saved, estimated",
            _saved(found.prefill_saved_s, found.hit_tokens),
            _saved(hour.prefill_saved_s, hour.hit_tokens),
        ),
        *((f"missed: {reason}", short_count(count), "") for reason, count in sorted(found.misses.items())),
    ]
    lines = [f"{name:<28} {total:>15} {last:>10}".rstrip() for name, total, last in rows]
    lines += [
        f"L1: {ByteSize(found.l1_used_bytes)} of {ByteSize(found.l1_capacity_bytes)} in use; engines: {found.engines}",
        f"server: {found.endpoint}, for {short_duration(found.uptime_s)}",
    ]
    if found.most_frequent_miss:
        lines.append(f"most frequent miss: {found.most_frequent_miss}")
    return lines


def _saved(seconds: float, hit_tokens: int) -> str:
    """Return the time saved; it is unknown where tokens were found by engines that report no speed, such as SGLang."""
    if hit_tokens and not seconds:
        return "unknown"
    return f"{seconds:.1f} s" if seconds < 10 else short_duration(seconds)


def _share(found: int, asked: int) -> str:
    return f"{short_count(found)} ({found / asked:.0%})" if asked else short_count(found)
