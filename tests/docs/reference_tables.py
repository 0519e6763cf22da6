"""Makes docs/reference/commands.md out of the command line itself, and docs/reference/metrics.md out of the table of
metrics."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvf_observe.http.exposition import Metric
from kvf_observe.metrics import OWN, TABLE
from tests.support.whole_cli import whole_cli

COMMANDS = """# List of commands

`kvframework COMMAND --help` prints a command's options. [Commands](../commands.md) has examples, signals
and exit statuses.
"""


def commands() -> str:
    """Return the page, without its note."""
    rows = [f"| `{name}` | {text} |" for name, text in _commands(whole_cli(without=("bench",)), "kvframework")]
    return "\n".join([COMMANDS, "| command | what it does |", "|---|---|", *rows, ""])


def _commands(command: Any, name: str) -> Iterator[tuple[str, str]]:
    """Every command that does something, and the first paragraph of its help. Commands of other distributions
    only this repository's own are there: what is installed must not change the page."""
    inner = getattr(command, "commands", {})
    if not inner or command.invoke_without_command:
        yield name, " ".join((command.help or "").split("\n\n")[0].split()).replace("|", "\\|")
    for each, inside in inner.items():
        yield from _commands(inside, f"{name} {each}")


METRICS = """# Metrics

[`kvframework observe`](../observe.md) serves these metrics at `/metrics`. The last column names the
metric's field of the [status document](../status.md). Names of metrics never change. Every metric starts
at 0; metrics with the label `node` exist only with the tier [peers](../peers.md). While no server answers,
only the metrics of the first table exist. Each bucket of a histogram ends at twice the end of the bucket
before it. The label `model` has at most 64 names and `other`; the label `tenant` has the names in the
configuration. If two tiers use one plugin, their label `tier` is `redis.0` and `redis.1`.
"""


def metrics() -> str:
    """The page, without its note."""
    parts = [METRICS, _section("Observing", OWN)]
    parts += [_section(title, metrics) for title, metrics in TABLE.items()]
    return "\n".join(parts)


def _section(title: str, metrics: tuple[Metric, ...]) -> str:
    lines = [f"## {title}", "| metric | type | labels | meaning | in the status document |", "|---|---|---|---|---|"]
    for metric in metrics:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        places = ", ".join(f"`{place}`" for place in metric.place.split(", ") if place)
        meaning = f"[{metric.help}](../operations.md#{metric.row})" if metric.row else metric.help
        lines.append(f"| `{metric.full}` | {metric.type} | {labels} | {meaning} | {places} |")
    return "\n".join([*lines, ""])
