"""The form of a status document on a terminal. Pure. A server's texts are shown verbatim, never as markup."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from kvframework.api.plugin import ByteSize
from kvframework.cli.console import WideTable
from kvframework.service.health import trouble
from kvframework.status import Device, Events, Instance, Recovered, Session, Status, Tier
from kvframework.text import counted, one_line, short_number

REFUSED_SHOWN = OTHERS_SHOWN = 4


def view_status(encoded: bytes, round_trip_s: float | None = None) -> RenderableType:
    """The document that REPORT_STATUS returns, and how long a NOOP takes."""
    document = msgspec.json.decode(encoded, type=Status)
    answers = [] if round_trip_s is None else [Text(f"answers in {round_trip_s * 1e3:.2f} ms")]
    tiers, instances = document.l2, document.instances
    devices = [device for transport in document.transports.values() for device in transport.devices]
    counted = [f"{name} {amount}" for name, amount in trouble(msgspec.json.decode(encoded)).items()]
    missing = document.server.missing_kernels
    return Group(
        *(_text(line) for line in _head(document)),
        *answers,
        *(_text(line, style="red") for line in _problems(document)),
        *(_text(line, style="yellow") for line in _refused(document)),
        *([Text(f"counted: {', '.join(counted)}", style="yellow")] if counted else []),
        *([_text(f"no compiled kernels for {', '.join(missing)}, which is slower", style="yellow")] if missing else []),
        *([_tiers(tiers)] if tiers else []),
        *_others(tiers),
        *([_devices(devices)] if devices else []),
        *(_text(line, style="yellow") for line in _lacks(devices)),
        _instances(instances) if instances else Text("no instance is registered"),
    )


def problem_lines(encoded: bytes) -> list[str]:
    """Return the current problems, a line each."""
    return [one_line(problem) for problem in _problems(msgspec.json.decode(encoded, type=Status))]


def _head(document: Status) -> list[str]:
    server, l1, lookups, sessions = document.server, document.l1, document.lookups, document.messaging.sessions
    tcp = f" and {server.tcp}" if server.tcp else ""
    lines = [
        f"kvframework {server.version} at {server.endpoint}{tcp} (pid {server.pid})",
        (
            f"up {server.uptime_s:.0f} s, boot {server.boot_id[:8] or '?'}, configuration {server.config}, "
            f"chunk size {server.chunk_size}"
        ),
        (
            f"L1 {ByteSize(l1.used_bytes)} of {ByteSize(l1.capacity_bytes)} "
            f"({l1.used_bytes / l1.capacity_bytes:.0%}), {counted(l1.objects, 'objects')}, {counted(l1.pins, 'pins')}, "
            f"{l1.write_leases} stores under way, {counted(l1.evictions, 'evictions')}, "
            f"fragmentation {l1.fragmentation:.0%}"
        ),
        *_recovered(l1.recovered),
    ]
    if l1.quarantined_bytes:
        lines.append(f"L1 quarantine {ByteSize(l1.quarantined_bytes)}: of writers that were late and still live")
    if lookups.asked_tokens:
        share = lookups.hit_tokens / lookups.asked_tokens
        lines.append(f"{counted(lookups.lookups, 'lookups')}, hit {share:.0%} of {lookups.asked_tokens} tokens")
    return [*lines, *_clients(sessions, server.version), *_pinned(sessions), *_events(document.events)]


def _clients(sessions: Sequence[Session], present: str) -> list[str]:
    """The releases of the clients that are connected, this command among them; by name those of another release than
    the server's."""
    if not sessions:
        return []
    numbers = Counter(session.client_version or "an unknown release" for session in sessions)
    releases = ", ".join(f"{number} of {release}" for release, number in numbers.items())
    line = f"{counted(len(sessions), 'clients')}: {releases}"
    others = [each for each in sessions if (each.client_version or present) != present]
    named = [f"{each.name!r} (process {each.pid}) is {each.client_version}" for each in others[:OTHERS_SHOWN]]
    return [f"{line}; {', '.join(named)}" if named else line]


def _pinned(sessions: Sequence[Session]) -> list[str]:
    """The clients that kept more than their share of L1 from eviction while others needed room."""
    return [
        f"L1 pinned by {each.name[:64]!r} (process {each.pid}): {ByteSize(each.pinned_bytes)}, "
        f"{counted(each.over_share, 'leases')} ended or refused by pin_share"
        for each in sessions
        if each.over_share
    ]


def _events(announced: Events) -> list[str]:
    """What is announced to routers. Nothing of a server without `[events]`."""
    if not announced.endpoint:
        return []
    blocks = " and ".join(f"{number} in {medium}" for medium, number in announced.blocks.items())
    return [f"events at {announced.endpoint}: {blocks} blocks announced, {announced.waiting} changes waiting"]


def _recovered(found: Recovered) -> list[str]:
    """What L1 began with. Nothing of a server without a keeper, and of a first start."""
    if found.objects:
        damaged = f", {found.damaged} of them damaged and dropped" if found.damaged else ""
        amount = f"{counted(found.objects, 'objects')} ({ByteSize(found.bytes)})"
        return [f"L1 recovered {amount} in {found.seconds:.2f} s{damaged}"]
    return [] if found.why_cold in ("", "no_keeper", "nothing_kept") else [f"L1 began empty: {found.why_cold}"]


def _problems(document: Status) -> list[str]:
    return [f"{problem.where}: {problem.fact}" for problem in document.problems]


def _refused(document: Status) -> list[str]:
    """Return the first `REFUSED_SHOWN` of the latest refusals."""
    return [
        f"refused: {each.what!r} of {each.client[:64]!r} (process {each.pid}), {each.count} times, last "
        f"{each.ago_s:.0f} s ago: [{each.code}] {each.reason}"
        for each in document.messaging.refused[:REFUSED_SHOWN]
    ]


def _tiers(tiers: Sequence[Tier]) -> WideTable:
    """Table of the tiers. `get` and `put` are p50 and p99 of calls in milliseconds."""
    counters = ("hits", "misses", "stored", "errors", "corrupt")
    table = _table("L2", "circuit", "codec", "used", "get ms", "put ms", *counters, "to write")
    for tier in tiers:
        facts = (tier.name or "?", tier.state or "?", tier.codec or "-", _usage(tier))
        calls = (_latency(tier, "get_into"), _latency(tier, "put"))
        _add(table, *facts, *calls, *(getattr(tier, counter) for counter in counters), tier.write_pending)
    return WideTable(table)


def _others(tiers: Sequence[Tier]) -> Iterator[RenderableType]:
    """What tiers tell of other nodes: what came from each, what went to them, and who was refused. A plugin makes these
    rows, so any field may be missing."""
    for tier in tiers:
        details = tier.details
        nodes = [node for node in details.get("nodes") or () if "node" in node]
        if nodes:
            table = _table(f"{tier.name} from", "state", "values", "bytes", "failed")
            for node in nodes:
                counters = (node.get("values", 0), ByteSize(node.get("nbytes", 0)), node.get("failed", 0))
                _add(table, node["node"], node.get("state", "?"), *counters)
            yield table
        lent = details.get("lending") or {}
        if lent:
            refused = ", ".join(f"{why} {number}" for why, number in (lent.get("refused") or {}).items() if number)
            size = ByteSize(lent.get("nbytes", 0))
            line = f"lent at {lent.get('at', '?')}: {counted(lent.get('values', 0), 'values')}, {size}"
            yield _text(f"{line}; refused: {refused}" if refused else line)
        for each in lent.get("strangers") or ():
            fact = f"{each.get('reason')}, {each.get('count')} times, last {each.get('ago_s')} s ago"
            yield _text(f"refused: {each.get('node')}: {fact}", style="yellow")


def _usage(tier: Tier) -> str:
    return f"{ByteSize(tier.usage.used_bytes)} / {ByteSize(tier.usage.capacity_bytes)}" if tier.usage else "-"


def _latency(tier: Tier, call: str) -> str:
    latency = tier.latency_ms.get(call)
    return f"{short_number(latency.p50)} / {short_number(latency.p99)}" if latency and latency.count else "-"


def _devices(devices: Sequence[Device]) -> Table:
    table = _table("device", "copier", "starts", "instances", "last error")
    for each in devices:
        pid = "none" if each.pid is None else each.pid
        _add(table, each.device, pid, each.starts, each.instances, each.last_error or "-")
    return table


def _lacks(devices: Sequence[Device]) -> list[str]:
    return [f"{device.device} goes without: {each}" for device in devices for each in device.lacks]


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
