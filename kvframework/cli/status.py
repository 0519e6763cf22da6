"""`kvframework status`: the state of a running server. A server's texts are shown verbatim, never as markup."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Annotated

import msgspec
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from kvframework.api.command import EXIT_FOUND, Endpoint, EndpointConfig, examples
from kvframework.api.console import WideTable, print_view, stdout
from kvframework.api.plugin import ByteSize
from kvframework.client.status_source import StatusSource, quiet_connection, server_endpoint
from kvframework.service.health import trouble
from kvframework.status import Device, Instance, Status, Tier
from kvframework.text import counted, one_line, short_number

app = typer.Typer()
REFUSED_SHOWN = OTHERS_SHOWN = 4


@app.command(
    epilog=examples(
        "kvframework status",
        "kvframework status --json | jq .l1",
        "kvframework status --check --timeout 1     for a health probe",
    )
)
def status(
    endpoint: Endpoint = None,
    config: EndpointConfig = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole document as JSON.")] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Print one line per problem, and exit with 1 if there is one.")
    ] = False,
    timeout: Annotated[float, typer.Option(min=0.01, max=3600, help="Seconds to wait for the server.")] = 3.0,
) -> None:
    """Show the state of a running server.

    With --check: exit status 0 if all works as configured, 1 if the server works with a problem (a tier is down, a
    device lost its copier, a client is refused), 2 if it does not answer within the timeout. The request goes through
    the serving loop, as those of engines do.
    """
    if check and as_json:
        raise typer.BadParameter("it goes with no --json", param_hint="--check")
    quiet_connection()
    source = StatusSource(server_endpoint(endpoint, config), timeout)
    try:
        document = source.ask()
    finally:
        source.close()
    if as_json:
        stdout.print_json(document.decode())
    elif not check:
        print_view(view_status(document, source.round_trip_s))
    else:
        problems = [one_line(each) for each in _problems(msgspec.json.decode(document, type=Status))]
        for line in problems or ["ok"]:
            stdout.print(line, markup=False)
        if problems:
            raise typer.Exit(EXIT_FOUND)


def view_status(encoded: bytes, round_trip_s: float | None = None) -> RenderableType:
    """The document that REPORT_STATUS returns, and how long a NOOP takes."""
    document = msgspec.json.decode(encoded, type=Status)
    devices = [device for transport in document.transports.values() for device in transport.devices]
    return Group(*_facts(document, trouble(msgspec.json.decode(encoded)), devices, round_trip_s))


def _facts(
    document: Status, troubles: dict[str, int], devices: Sequence[Device], round_trip_s: float | None
) -> Iterator[RenderableType]:
    yield from map(_text, _head(document))
    if round_trip_s is not None:
        yield _text(f"answers in {round_trip_s * 1e3:.2f} ms")
    yield from (_text(line, "red") for line in _problems(document))
    for each in document.messaging.refused[:REFUSED_SHOWN]:
        whose = f"{each.client[:64]!r} (process {each.pid}), {each.count} times, last {each.ago_s:.0f} s ago"
        yield _text(f"refused: {each.what!r} of {whose}: [{each.code}] {each.reason}", "yellow")
    if troubles:
        yield _text(f"counted: {', '.join(f'{name} {amount}' for name, amount in troubles.items())}", "yellow")
    if missing := document.server.missing_kernels:
        yield _text(f"no compiled kernels for {', '.join(missing)}, which is slower", "yellow")
    if document.l2:
        yield _tiers(document.l2)
    for tier in document.l2:
        yield from _other_nodes(tier)
    if devices:
        yield _devices(devices)
        yield from (_text(f"{each.device} goes without: {lack}", "yellow") for each in devices for lack in each.lacks)
    yield _instances(document.instances) if document.instances else _text("no instance is registered")


def _head(document: Status) -> Iterator[str]:
    server, l1, lookups, events = document.server, document.l1, document.lookups, document.events
    tcp = f" and {server.tcp}" if server.tcp else ""
    yield f"kvframework {server.version} at {server.endpoint}{tcp} (pid {server.pid})"
    boot = server.boot_id[:8] or "?"
    yield f"up {server.uptime_s:.0f} s, boot {boot}, configuration {server.config}, chunk size {server.chunk_size}"
    used = f"{ByteSize(l1.used_bytes)} of {ByteSize(l1.capacity_bytes)} ({l1.used_bytes / l1.capacity_bytes:.0%})"
    held = f"{counted(l1.objects, 'objects')}, {counted(l1.pins, 'pins')}, {l1.write_leases} stores under way"
    yield f"L1 {used}, {held}, {counted(l1.evictions, 'evictions')}, fragmentation {l1.fragmentation:.0%}"
    found = l1.recovered
    if found.objects:
        damaged = f", {found.damaged} of them damaged and dropped" if found.damaged else ""
        amount = f"{counted(found.objects, 'objects')} ({ByteSize(found.bytes)})"
        yield f"L1 recovered {amount} in {found.seconds:.2f} s{damaged}"
    elif found.why_cold not in ("", "no_keeper", "nothing_kept"):
        yield f"L1 began empty: {found.why_cold}"
    if l1.quarantined_bytes:
        yield f"L1 quarantine {ByteSize(l1.quarantined_bytes)}: of writers that were late and still live"
    if lookups.asked_tokens:
        share = lookups.hit_tokens / lookups.asked_tokens
        yield f"{counted(lookups.lookups, 'lookups')}, hit {share:.0%} of {lookups.asked_tokens} tokens"
    yield from _clients(document)
    if events.endpoint:
        blocks = " and ".join(f"{number} in {medium}" for medium, number in events.blocks.items())
        yield f"events at {events.endpoint}: {blocks} blocks announced, {events.waiting} changes waiting"


def _clients(document: Status) -> Iterator[str]:
    """The releases of the connected clients, this command among them, and by name those of another release than the
    server's; and who kept more than its share of L1 from eviction while others needed room."""
    sessions, present = document.messaging.sessions, document.server.version
    if sessions:
        numbers = Counter(session.client_version or "an unknown release" for session in sessions)
        releases = ", ".join(f"{number} of {release}" for release, number in numbers.items())
        others = [each for each in sessions if (each.client_version or present) != present]
        named = [f"{each.name!r} (process {each.pid}) is {each.client_version}" for each in others[:OTHERS_SHOWN]]
        line = f"{counted(len(sessions), 'clients')}: {releases}"
        yield f"{line}; {', '.join(named)}" if named else line
    for each in sessions:
        if each.over_share:
            ended = f"{counted(each.over_share, 'leases')} ended or refused by pin_share"
            yield f"L1 pinned by {each.name[:64]!r} (process {each.pid}): {ByteSize(each.pinned_bytes)}, {ended}"


def _problems(document: Status) -> list[str]:
    return [f"{problem.where}: {problem.fact}" for problem in document.problems]


def _tiers(tiers: Sequence[Tier]) -> WideTable:
    """Table of the tiers. `get` and `put` are p50 and p99 of calls in milliseconds."""
    counters = ("hits", "misses", "stored", "errors", "corrupt")
    table = _table("L2", "circuit", "codec", "used", "get ms", "put ms", *counters, "to write")
    for tier in tiers:
        used = f"{ByteSize(tier.usage.used_bytes)} / {ByteSize(tier.usage.capacity_bytes)}" if tier.usage else "-"
        facts = (tier.name or "?", tier.state or "?", tier.codec or "-", used)
        calls = (_latency(tier, "get_into"), _latency(tier, "put"))
        _add(table, *facts, *calls, *(getattr(tier, counter) for counter in counters), tier.write_pending)
    return WideTable(table)


def _latency(tier: Tier, call: str) -> str:
    latency = tier.latency_ms.get(call)
    return f"{short_number(latency.p50)} / {short_number(latency.p99)}" if latency and latency.count else "-"


def _other_nodes(tier: Tier) -> Iterator[RenderableType]:
    """What a tier says of other nodes: what came from each, what went to them, and who was refused. A plugin makes
    these rows, so any field may be missing."""
    nodes = [node for node in tier.details.get("nodes") or () if "node" in node]
    if nodes:
        table = _table(f"{tier.name} from", "state", "values", "bytes", "failed")
        for node in nodes:
            counters = (node.get("values", 0), ByteSize(node.get("nbytes", 0)), node.get("failed", 0))
            _add(table, node["node"], node.get("state", "?"), *counters)
        yield table
    lent = tier.details.get("lending") or {}
    if lent:
        refused = ", ".join(f"{why} {number}" for why, number in (lent.get("refused") or {}).items() if number)
        size = ByteSize(lent.get("nbytes", 0))
        line = f"lent at {lent.get('at', '?')}: {counted(lent.get('values', 0), 'values')}, {size}"
        yield _text(f"{line}; refused: {refused}" if refused else line)
    for each in lent.get("strangers") or ():
        fact = f"{each.get('reason')}, {each.get('count')} times, last {each.get('ago_s')} s ago"
        yield _text(f"refused: {each.get('node')}: {fact}", "yellow")


def _devices(devices: Sequence[Device]) -> Table:
    table = _table("device", "copier", "starts", "instances", "last error")
    for each in devices:
        pid = "none" if each.pid is None else each.pid
        _add(table, each.device, pid, each.starts, each.instances, each.last_error or "-")
    return table


def _instances(instances: Sequence[Instance]) -> WideTable:
    heads = ("instance", "pid", "model", "rank", "namespace", "transport", "format", "layers", "dtype", "chunk")
    table = _table(*heads, "bytes/token")
    for each in instances:
        rank = f"{'?' if each.rank is None else each.rank}/{each.world_size}"
        # Where objects are opaque bytes, their dtype is not the model's.
        model = each.model_dtype or each.dtype
        dtype = each.dtype if model == each.dtype else f"{each.dtype}, model {model}"
        whose = (each.instance_id, each.pid, each.model, rank, each.namespace[:8])
        form = (each.transport, each.format, each.layers, dtype, each.chunk_tokens, short_number(each.bytes_per_token))
        _add(table, *whose, *form)
    return WideTable(table)


def _text(value: object, style: str = "") -> Text:
    return Text(one_line(str(value)), style=style)


def _add(table: Table, *cells: object) -> None:
    table.add_row(*map(_text, cells))


def _table(*headers: str) -> Table:
    """Return a compact table; on a narrow terminal cells are folded and nothing is cut off."""
    columns = (Column(header, overflow="fold") for header in headers)
    return Table(*columns, box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
