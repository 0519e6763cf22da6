"""The form of a status document on a terminal. Pure. A server's texts are shown verbatim, never as markup."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Column, Table
from rich.text import Text

from kvframework.api.options import ByteSize
from kvframework.service.health import trouble
from kvframework.text import counted, one_line, short_number

Document = dict[str, Any]
REFUSED_SHOWN = OTHERS_SHOWN = 4
_ANY_WIDTH = 10_000


def view_status(encoded: bytes, round_trip_s: float | None = None) -> RenderableType:
    """The document that REPORT_STATUS returns, and how long a NOOP takes."""
    document: Document = msgspec.json.decode(encoded)
    answers = [] if round_trip_s is None else [Text(f"answers in {round_trip_s * 1e3:.2f} ms")]
    tiers, instances, devices = document["l2"], document["instances"], _devices_of(document)
    counted = [f"{name} {amount}" for name, amount in trouble(document).items()]
    missing = document["server"].get("missing_kernels")
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
    return [one_line(problem) for problem in _problems(msgspec.json.decode(encoded))]


def _head(document: Document) -> list[str]:
    server, l1, lookups = document["server"], document["l1"], document.get("lookups", {})
    tcp = f" and {server['tcp']}" if server.get("tcp") else ""
    lines = [
        f"kvframework {server['version']} at {server['endpoint']}{tcp} (pid {server['pid']})",
        (
            f"up {server['uptime_s']:.0f} s, boot {server.get('boot_id', '?')[:8]}, configuration {server['config']}, "
            f"chunk size {server['chunk_size']}"
        ),
        (
            f"L1 {ByteSize(l1['used_bytes'])} of {ByteSize(l1['capacity_bytes'])} "
            f"({l1['used_bytes'] / l1['capacity_bytes']:.0%}), {counted(l1['objects'], 'objects')}, "
            f"{counted(l1['pins'], 'pins')}, "
            f"{l1.get('write_leases', 0)} stores under way, {counted(l1['evictions'], 'evictions')}, "
            f"fragmentation {l1['fragmentation']:.0%}"
        ),
    ]
    lines += _recovered(l1.get("recovered", {}))
    if l1.get("quarantined_bytes"):
        lines.append(f"L1 quarantine {ByteSize(l1['quarantined_bytes'])}: of writers that were late and still live")
    if lookups.get("asked_tokens"):
        share = lookups["hit_tokens"] / lookups["asked_tokens"]
        lines.append(f"{counted(lookups['lookups'], 'lookups')}, hit {share:.0%} of {lookups['asked_tokens']} tokens")
    lines += _clients(document)
    lines += _pinned(document.get("messaging", {}).get("sessions", ()))
    return lines + _events(document.get("events", {}))


def _clients(document: Document) -> list[str]:
    """The releases of the clients that are connected, this command among them; by name those of another release than
    the server's."""
    sessions = document.get("messaging", {}).get("sessions", ())
    if not sessions:
        return []
    numbers = Counter(session.get("client_version") or "an unknown release" for session in sessions)
    releases = ", ".join(f"{number} of {release}" for release, number in numbers.items())
    line = f"{counted(len(sessions), 'clients')}: {releases}"
    present = document["server"]["version"]
    others = [each for each in sessions if (each.get("client_version") or present) != present]
    named = [f"{each['name']!r} (process {each['pid']}) is {each['client_version']}" for each in others[:OTHERS_SHOWN]]
    return [f"{line}; {', '.join(named)}" if named else line]


def _pinned(sessions: Iterable[Document]) -> list[str]:
    """The clients that kept more than their share of L1 from eviction while others needed room."""
    return [
        f"L1 pinned by {each['name'][:64]!r} (process {each['pid']}): {ByteSize(each['pinned_bytes'])}, "
        f"{counted(each['over_share'], 'leases')} ended or refused by pin_share"
        for each in sessions
        if each.get("over_share")
    ]


def _events(announced: Document) -> list[str]:
    """What is announced to routers. Nothing of a server without `[events]`."""
    if not announced:
        return []
    blocks = " and ".join(f"{number} in {medium}" for medium, number in announced["blocks"].items())
    return [f"events at {announced['endpoint']}: {blocks} blocks announced, {announced['waiting']} changes waiting"]


def _recovered(found: Document) -> list[str]:
    """What L1 began with. Nothing of a server without a keeper, and of a first start."""
    if found.get("objects"):
        size = ByteSize(found["bytes"])
        damaged = f", {found['damaged']} of them damaged and dropped" if found.get("damaged") else ""
        return [f"L1 recovered {counted(found['objects'], 'objects')} ({size}) in {found['seconds']:.2f} s{damaged}"]
    if found.get("why_cold", "no_keeper") in ("", "no_keeper", "nothing_kept"):
        return []
    return [f"L1 began empty: {found['why_cold']}"]


def _problems(document: Document) -> list[str]:
    """Older servers have no such field."""
    return [f"{problem['where']}: {problem['fact']}" for problem in document.get("problems", ())]


def _refused(document: Document) -> list[str]:
    """Return the first `REFUSED_SHOWN` of the latest refusals."""
    return [
        f"refused: {each['what']!r} of {each['client'][:64]!r} (process {each['pid']}), {each['count']} times, last "
        f"{each['ago_s']:.0f} s ago: [{each['code']}] {each['reason']}"
        for each in document.get("messaging", {}).get("refused", ())[:REFUSED_SHOWN]
    ]


class _Rows:
    """A table. On a terminal that is too narrow for it, the columns from number `parted` on go into a second table,
    which repeats the first column."""

    def __init__(self, *headers: str, parted: int) -> None:
        self._headers = headers
        self._parted = parted
        self._rows: list[tuple[Text, ...]] = []

    def add(self, *cells: object) -> None:
        self._rows.append(tuple(_text(cell) for cell in cells))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        whole = self._table(range(len(self._headers)))
        if console.measure(whole, options=options.update(max_width=_ANY_WIDTH)).maximum <= options.max_width:
            yield whole
            return
        yield self._table(range(self._parted))
        yield self._table((0, *range(self._parted, len(self._headers))))

    def _table(self, columns: Iterable[int]) -> Table:
        chosen = list(columns)
        table = _table(*(self._headers[index] for index in chosen))
        for row in self._rows:
            table.add_row(*(row[index] for index in chosen))
        return table


def _tiers(tiers: list[Document]) -> _Rows:
    """Table of the tiers. `get` and `put` are p50 and p99 of calls in milliseconds. Any field may be missing, since
    servers differ."""
    counters = ("hits", "misses", "stored", "errors", "corrupt")
    table = _Rows("L2", "circuit", "codec", "used", "get ms", "put ms", *counters, "to write", parted=6)
    for tier in tiers:
        cells = (
            tier.get("name", "?"),
            tier.get("state", "?"),
            tier.get("codec", "-"),
            _usage(tier),
            _latency(tier, "get_into"),
            _latency(tier, "put"),
            *(tier.get(counter, 0) for counter in counters),
            tier.get("write_pending", 0),
        )
        table.add(*cells)
    return table


def _others(tiers: list[Document]) -> Iterator[RenderableType]:
    """What tiers tell of other nodes: what came from each, what went to them, and who was refused. A plugin makes these
    rows, so any field may be missing."""
    for tier in tiers:
        details = tier.get("details", {})
        nodes = [node for node in details.get("nodes") or () if "node" in node]
        if nodes:
            table = _table(f"{tier.get('name', '?')} from", "state", "values", "bytes", "failed")
            for node in nodes:
                counters = (node.get("values", 0), ByteSize(node.get("nbytes", 0)), node.get("failed", 0))
                table.add_row(*(_text(cell) for cell in (node["node"], node.get("state", "?"), *counters)))
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


def _usage(tier: Document) -> str:
    usage = tier.get("usage")
    return f"{ByteSize(usage['used_bytes'])} / {ByteSize(usage['capacity_bytes'])}" if usage else "-"


def _latency(tier: Document, call: str) -> str:
    latency = tier.get("latency_ms", {}).get(call, {})
    return f"{short_number(latency['p50'])} / {short_number(latency['p99'])}" if latency.get("count") else "-"


def _devices_of(document: Document) -> list[Document]:
    return [device for transport in document.get("transports", {}).values() for device in transport.get("devices", ())]


def _devices(devices: list[Document]) -> Table:
    table = _table("device", "copier", "starts", "instances", "last error")
    for device in devices:
        pid = "none" if device["pid"] is None else device["pid"]
        cells = (device["device"], pid, device["starts"], device["instances"], device["last_error"] or "-")
        table.add_row(*(_text(cell) for cell in cells))
    return table


def _lacks(devices: list[Document]) -> list[str]:
    return [f"{device['device']} goes without: {each}" for device in devices for each in device.get("lacks", ())]


def _instances(instances: list[Document]) -> _Rows:
    table = _Rows(
        "instance",
        "pid",
        "model",
        "rank",
        "namespace",
        "transport",
        "format",
        "layers",
        "dtype",
        "chunk",
        "bytes/token",
        parted=5,
    )
    for context in instances:
        rank = "?" if context["rank"] is None else context["rank"]
        cells = (
            context["instance_id"],
            context["pid"],
            context["model"],
            f"{rank}/{context['world_size']}",
            context["namespace"][:8],
            context["transport"],
            context["format"],
            context["layers"],
            _dtype(context),
            context["chunk_tokens"],
            short_number(context["bytes_per_token"]),
        )
        table.add(*cells)
    return table


def _dtype(context: Document) -> str:
    """Older servers do not tell that of the model, which shows where objects are opaque bytes."""
    dtype: str = context["dtype"]
    model = context.get("model_dtype") or dtype
    return dtype if model == dtype else f"{dtype}, model {model}"


def _text(value: object, style: str = "") -> Text:
    return Text(one_line(str(value)), style=style)


def _table(*headers: str) -> Table:
    """Return a compact table; on a narrow terminal cells are folded and nothing is cut off."""
    columns = (Column(header, overflow="fold") for header in headers)
    return Table(*columns, box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
