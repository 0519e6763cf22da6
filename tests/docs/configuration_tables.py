"""Makes docs/reference/configuration.md, the core's keys, out of the structs of `kvframework.config.schema`."""

from __future__ import annotations

import re

from kvframework.config import schema
from kvframework.registry.tables import describe_options
from kvframework.running_config import changes_now
from tests.docs.option_tables import rows

# The table of the TOML file that each struct describes, with its heading.
TABLES = {
    "ServerConfig": ("server", "[server]"),
    "CurveConfig": ("server.curve", "[server.curve]"),
    "LogConfig": ("log", "[log]"),
    "ObserveConfig": ("observe", "[observe]"),
    "L1Keys": ("l1", "[l1]"),
    "L2Keys": ("l2", "[[l2]]"),
    "TenantKeys": ("tenants.acme", "[tenants.NAME]"),
}
HEAD = """\
# Configuration keys

This page lists the keys of [the configuration](../configuration.md) that belong to no plugin. In the
column "changes", "now" means that `kvframework config apply` changes the key in a running server;
"restart" means that the server must restart. `[l1]` and `[[l2]]` also take the
[options of their plugin](options.md).
"""
_KEY = re.compile(r"\| `(\w+)` \|")


def page() -> str:
    """Return the page, without its note."""
    return "\n".join([HEAD, *(f"## {heading}\n{_table(struct)}" for struct, (_, heading) in TABLES.items())])


def changes(struct: str) -> dict[str, str]:
    """Return when a change of each key of a struct takes effect: "now" or "restart"."""
    keys = [each.name for each in describe_options(getattr(schema, struct))]
    return {key: "now" if changes_now(f"{TABLES[struct][0]}.{key}") else "restart" for key in keys}


def _table(struct: str) -> str:
    head, line, *cells = rows(describe_options(getattr(schema, struct)), "key").splitlines()
    when = changes(struct)
    keyed = [f"{row} {when[_KEY.match(row)[1]]} |" for row in cells]  # type: ignore[index]
    return "\n".join([f"{head} changes |", f"{line}---|", *keyed, ""])
