"""What `kvframework hold --status` shows."""

from __future__ import annotations

from typing import Any

from kvframework.api.options import ByteSize
from kvframework.cli.console import print_text
from kvframework.cli.numbers import short_number


def print_status(status: dict[str, Any]) -> None:
    """Print the keeper's reply: the server, its starts, and a line for each thing that is kept."""
    server = status["server"]
    if server is not None:
        form = "ready" if server["ready"] else "not ready yet"
        text = f"server: process {server['pid']}, {form}, since {short_number(server['since_s'])} s"
    elif status["next_start_s"] is not None:
        text = f"server: none, the next start is in {short_number(status['next_start_s'])} s"
    else:
        text = "server: none"
    print_text(text)
    print_text(f"starts: {status['starts']}{'; ' + status['last_end'] if status['last_end'] else ''}")
    for row in status["held"]:
        print_text(f"kept: {row['name']}, {ByteSize(row['size'])}, {ByteSize(row['bytes'])} of memory")
    if not status["held"]:
        print_text("kept: nothing")
    print_text(f"keeper: process {status['pid']}")
