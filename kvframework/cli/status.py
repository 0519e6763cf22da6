"""Owns `kvframework status`: asks a running server and shows what it says."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.table import Column, Table
from rich.text import Text

from kvframework.api import ByteSize
from kvframework.cli.console import stdout
from kvframework.client.connection import ENDPOINT_VARIABLE, KVClient
from kvframework.config import default_endpoint, load_config
from kvframework.wire import messages as m


def register(app: typer.Typer) -> None:
    app.command("status")(status)


def status(
    endpoint: Annotated[str | None, typer.Option(help="The server's endpoint.")] = None,
    config: Annotated[Path | None, typer.Option("--config", help="Take the endpoint from this TOML file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole document as JSON.")] = False,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for the server.")] = 3.0,
) -> None:
    """Show what a running server holds and does."""
    target = endpoint or os.environ.get(ENDPOINT_VARIABLE) or load_config(config).server.endpoint or default_endpoint()
    with KVClient(target, name="status", connect_timeout_s=timeout) as client:
        _ = client.hello
        reply = client.request("REPORT_STATUS", m.Empty(), m.StatusReply, timeout=timeout)
    if as_json:
        stdout.print_json(reply.document.decode())
    else:
        _show(msgspec.json.decode(reply.document))


def _show(document: dict[str, Any]) -> None:
    """What the server says is shown as it is, never read as markup."""
    server, l1 = document["server"], document["l1"]
    lines = [
        f"kvframework {server['version']} at {server['endpoint']} (pid {server['pid']})",
        f"up {server['uptime_s']:.0f} s, configuration {server['config']}, chunk size {server['chunk_size']}",
        (
            f"L1 {ByteSize(l1['used_bytes'])} of {ByteSize(l1['capacity_bytes'])} "
            f"({l1['used_bytes'] / l1['capacity_bytes']:.0%}), {l1['objects']} objects, {l1['pins']} pins, "
            f"{l1['evictions']} evictions, fragmentation {l1['fragmentation']:.0%}"
        ),
    ]
    lines += [
        f"L2 {tier['name']} {tier['state']}, {tier.get('stored', 0)} stored, {tier.get('hits', 0)} hits, "
        f"{tier.get('errors', 0)} errors, {tier['write_pending']} to write"
        for tier in document["l2"]
    ]
    for line in lines:
        stdout.print(line, markup=False)
    if document["instances"]:
        stdout.print(_instances(document["instances"]))
    else:
        stdout.print("no instance is registered")


def _instances(instances: list[dict[str, Any]]) -> Table:
    headers = ("instance", "pid", "model", "rank", "transport", "format", "layers", "dtype", "chunk", "bytes/token")
    table = Table(*(Column(header, overflow="fold") for header in headers))
    for context in instances:
        rank = "?" if context["rank"] is None else context["rank"]
        cells = (
            context["instance_id"], context["pid"], context["model"], f"{rank}/{context['world_size']}",
            context["transport"], context["format"], context["layers"], context["dtype"], context["chunk_tokens"],
            f"{context['bytes_per_token']:g}",
        )  # fmt: skip
        table.add_row(*(Text(str(cell)) for cell in cells))
    return table
