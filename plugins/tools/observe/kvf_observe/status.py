"""`kvframework status`: the state of a running server, in lines. Its texts are shown verbatim, never as markup."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from typing import Annotated

import msgspec
import typer
from rich.console import Group
from rich.text import Text

from kvframework.api.command import Endpoint, EndpointConfig, examples
from kvframework.api.console import counted, print_view, short_number, stdout
from kvframework.api.plugin import ByteSize
from kvframework.api.process import one_line
from kvframework.client import StatusSource, quiet_connection, server_endpoint
from kvframework.status import Instance, Status, Tier, trouble

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
        raise typer.BadParameter("--check and --json cannot be given together", param_hint="--check")
    quiet_connection()
    with closing(StatusSource(server_endpoint(endpoint, config), timeout)) as source:
        document = source.ask()
    if as_json:
        stdout.print_json(document.decode())
    elif not check:
        print_view(view_status(document, source.round_trip_s))
    else:
        problems = [one_line(each) for each in _problems(msgspec.json.decode(document, type=Status))]
        for line in problems or ["ok"]:
            stdout.print(line, markup=False)
        if problems:
            raise typer.Exit(1)


def view_status(encoded: bytes, round_trip_s: float | None = None) -> Group:
    """The lines about the document that REPORT_STATUS returns, and how long a NOOP takes."""
    document = msgspec.json.decode(encoded, type=Status)
    troubles = {name: amount for name, _, amount in trouble(msgspec.json.decode(encoded))}
    return Group(*(Text(one_line(line), style) for line, style in _lines(document, troubles, round_trip_s)))


def _lines(document: Status, troubles: dict[str, int], round_trip_s: float | None) -> Iterator[tuple[str, str]]:
    """Each line and its style."""
    yield from ((line, "") for line in _head(document))
    if round_trip_s is not None:
        yield f"the server answered in {round_trip_s * 1e3:.2f} ms", ""
    yield from ((line, "red") for line in _problems(document))
    for each in document.messaging.refused[:REFUSED_SHOWN]:
        whose = f"{each.client[:64]!r} (process {each.pid}), {each.count} times, last {each.ago_s:.0f} s ago"
        yield f"refused: the request {each.what!r} of client {whose}: [{each.code}] {each.reason}", "yellow"
    if troubles:
        yield f"problems counted: {', '.join(f'{name} {amount}' for name, amount in troubles.items())}", "yellow"
    if missing := document.server.missing_kernels:
        yield f"compiled kernels are missing, so these are slower: {', '.join(missing)}", "yellow"
    for tier in document.l2:
        yield _tier(tier), ""
        yield from _other_nodes(tier)
    for device in (each for transport in document.transports.values() for each in transport.devices):
        copier = "no copier process" if device.pid is None else f"copier process {device.pid}"
        error = f", last error: {device.last_error}" if device.last_error else ""
        counts = f"{counted(device.starts, 'starts')}, {counted(device.instances, 'instances')}"
        yield f"device {device.device}: {copier}, {counts}{error}", ""
        yield from ((f"{device.device} lacks a feature: {lack}", "yellow") for lack in device.lacks)
    yield from ((_instance(each), "") for each in document.instances)
    if not document.instances:
        yield "no instance is registered", ""


def _head(document: Status) -> Iterator[str]:
    server, l1, lookups, events = document.server, document.l1, document.lookups, document.events
    tcp = f" and {server.tcp}" if server.tcp else ""
    yield f"kvframework {server.version} at {server.endpoint}{tcp} (pid {server.pid})"
    boot = server.boot_id[:8] or "?"
    least = f"{server.least_chunk} to " if 0 < server.least_chunk < server.chunk_size else ""
    chunks = f"chunks of {least}{server.chunk_size} tokens"
    yield f"up {server.uptime_s:.0f} s, boot {boot}, configuration {server.config}, {chunks}"
    used = f"{ByteSize(l1.used_bytes)} of {ByteSize(l1.capacity_bytes)} ({l1.used_bytes / l1.capacity_bytes:.0%})"
    held = f"{counted(l1.objects, 'objects')}, {counted(l1.pins, 'pins')}, {l1.write_leases} stores in progress"
    yield f"L1 {used}, {held}, {counted(l1.evictions, 'evictions')}, fragmentation {l1.fragmentation:.0%}"
    found = l1.recovered
    if found.objects:
        damaged = f", {found.damaged} damaged objects dropped" if found.damaged else ""
        amount = f"{counted(found.objects, 'objects')} ({ByteSize(found.bytes)})"
        yield f"L1 recovered {amount} in {found.seconds:.2f} s{damaged}"
    elif found.why_cold not in ("", "no_keeper", "nothing_kept"):
        yield f"L1 began empty: {found.why_cold}"
    if l1.quarantined_bytes:
        yield f"L1 quarantine {ByteSize(l1.quarantined_bytes)}, held for writers that missed their deadline"
    if (drain := document.drain).done is not None:
        amount = f"{counted(drain.written, 'objects')} written, {drain.left} ({ByteSize(drain.left_bytes)}) left"
        yield f"the server drains, and ends within {drain.left_s:.0f} s: {amount}"
    if lookups.asked_tokens:
        share = lookups.hit_tokens / lookups.asked_tokens
        yield f"{counted(lookups.lookups, 'lookups')}, hit {share:.0%} of {lookups.asked_tokens} tokens"
    yield from _clients(document)
    if events.endpoint:
        blocks = " and ".join(f"{number} in {medium}" for medium, number in events.blocks.items())
        yield f"events at {events.endpoint}: {blocks} blocks announced to routers, {events.waiting} changes waiting"


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


def _tier(tier: Tier) -> str:
    """What a tier holds and did, with p50 and p99 of its calls."""
    codec = f", codec {tier.codec}" if tier.codec else ""
    usage = tier.usage
    used = f", {ByteSize(usage.used_bytes)} of {ByteSize(usage.capacity_bytes)}" if usage else ""
    calls = ""
    for name, call in (("get", "get_into"), ("put", "put")):
        latency = tier.latency_ms.get(call)
        if latency and latency.count:
            calls += f", {name} {short_number(latency.p50)} / {short_number(latency.p99)} ms"
    counters = ", ".join(f"{getattr(tier, name)} {name}" for name in ("hits", "misses", "stored", "errors", "corrupt"))
    state = tier.state or "?"
    return f"L2 {tier.name or '?'}: circuit {state}{codec}{used}{calls}; {counters}, {tier.write_pending} to write"


def _other_nodes(tier: Tier) -> Iterator[tuple[str, str]]:
    """What a tier says of other nodes: what came from each, what went to them, and who was refused. A plugin makes
    these rows, so any field may be missing."""
    for node in tier.details.get("nodes") or ():
        if "node" in node:
            size = ByteSize(node.get("nbytes", 0))
            came = f"{counted(node.get('values', 0), 'values')}, {size}, {node.get('failed', 0)} failed"
            yield f"{tier.name} from {node['node']}: {node.get('state', '?')}, {came}", ""
    lent = tier.details.get("lending") or {}
    if lent:
        refused = ", ".join(f"{why} {number}" for why, number in (lent.get("refused") or {}).items() if number)
        size = ByteSize(lent.get("nbytes", 0))
        line = f"loaded by other nodes at {lent.get('at', '?')}: {counted(lent.get('values', 0), 'values')}, {size}"
        yield f"{line}; refused: {refused}" if refused else line, ""
    for each in lent.get("strangers") or ():
        fact = f"{each.get('reason')}, {each.get('count')} times, last {each.get('ago_s')} s ago"
        yield f"refused: node {each.get('node')}: {fact}", "yellow"


def _instance(each: Instance) -> str:
    rank = f"{'?' if each.rank is None else each.rank}/{each.world_size}"
    whose = f"model {each.model}, rank {rank}, namespace {each.namespace[:8]}"
    # Where objects are opaque bytes, their dtype is not the model's.
    model = each.model_dtype or each.dtype
    dtype = each.dtype if model == each.dtype else f"{each.dtype} (model {model})"
    form = f"{each.format}, {each.layers} layers of {dtype}, chunks of {each.chunk_tokens} tokens"
    size = f"{short_number(each.bytes_per_token)} bytes per token"
    return f"instance {each.instance_id} (process {each.pid}): {whose}; {each.transport}, {form}, {size}"
