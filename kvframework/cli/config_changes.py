"""The work of `kvframework config apply`: the request to the server, and its answer as a table."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.table import Table
from rich.text import Text

from kvframework.cli.console import print_table, print_text
from kvframework.cli.status_source import quiet_connection
from kvframework.client.connection import ENDPOINT_VARIABLE, KVClient
from kvframework.config import assemble, default_endpoint, read_layers
from kvframework.errors import UnknownRequest, VersionMismatch
from kvframework.masking import HIDDEN
from kvframework.wire import messages as m

CONNECT_S = 5.0


def ask_for_changes(
    file: Path | None, overrides: Sequence[str], endpoint: str | None, *, dry_run: bool, timeout_s: float
) -> m.ConfigApplied:
    """Send the configuration to its server. Blocks for `timeout_s` at most. Raises what reading a configuration and
    `KVClient` raise, and the server's own error about it."""
    layers = read_layers(file, overrides, os.environ)
    config = assemble(layers)
    asked = m.ApplyConfig(msgspec.json.encode(layers.raw), layers.where, dry_run)
    endpoint = endpoint or os.environ.get(ENDPOINT_VARIABLE) or config.server.endpoint or default_endpoint()
    quiet_connection()
    with KVClient(endpoint, name="config", connect_timeout_s=min(timeout_s, CONNECT_S)) as client:
        _ = client.hello
        try:
            return client.request("APPLY_CONFIG", asked, m.ConfigApplied, timeout=timeout_s)
        except UnknownRequest:
            raise VersionMismatch(
                "this server is older: its configuration changes by a restart only", where=client.endpoint
            ) from None


def show_changes(applied: m.ConfigApplied, *, dry_run: bool) -> None:
    """Print a row for each key that differs, and what has come of it."""
    if applied.changes:
        table = Table(box=None, pad_edge=False)
        for title in ("KEY", "RUNNING", "NEW", "CHANGES"):
            table.add_column(title, overflow="fold")
        for each in applied.changes:
            old, new = (value or "not set" for value in (each.old, each.new))
            if HIDDEN in each.old and each.old == each.new:
                new = "another secret"
            when = Text("now", "green") if each.now else Text("needs restart", "yellow")
            table.add_row(Text(each.key), Text(old), Text(new), when)
        print_table(table)
    print_text(_outcome(applied, dry_run=dry_run))


def _outcome(applied: m.ConfigApplied, *, dry_run: bool) -> str:
    if not applied.changes:
        return "nothing differs"
    waiting = sum(not each.now for each in applied.changes)
    if waiting:
        return f"nothing has changed: {waiting} of {len(applied.changes)} need a restart"
    return "nothing has changed: a dry run" if dry_run else f"applied: {len(applied.changes)} changed"
