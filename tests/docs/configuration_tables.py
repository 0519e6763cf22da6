"""Makes the tables of the core's keys in docs/configuration.md out of the structs of `kvframework.config.schema`,
between comments:

    <!-- keys: ServerConfig -->
    <!-- end of keys -->
"""

from __future__ import annotations

import re

from kvframework.config import schema
from kvframework.registry import describe_options
from kvframework.running_config import changes_now
from tests.docs.option_tables import rows

BLOCK = re.compile(r"(<!-- keys: (\w+) -->\n).*?(<!-- end of keys -->)", re.DOTALL)
# The table of the TOML file that each struct describes.
TABLES = {
    "ServerConfig": "server",
    "CurveConfig": "server.curve",
    "LogConfig": "log",
    "ObserveConfig": "observe",
    "L1Keys": "l1",
    "L2Keys": "l2",
    "TenantKeys": "tenants.acme",
}
STRUCTS = tuple(TABLES)
KEY = re.compile(r"\| `(\w+)` \|")


def renewed(page: str) -> str:
    """The page with its tables as the schema is."""
    return BLOCK.sub(lambda block: block[1] + _table(block[2]) + block[3], page)


def _table(struct: str) -> str:
    """The table of a struct's keys, with a column that says when a change of each takes effect."""
    head, line, *cells = rows(describe_options(getattr(schema, struct)), "key").splitlines()
    keys = [KEY.match(row)[1] for row in cells]  # type: ignore[index]
    now = ["now" if changes_now(f"{TABLES[struct]}.{key}") else "restart" for key in keys]
    changes = [f"{row} {when} |" for row, when in zip(cells, now, strict=True)]
    return "\n".join([f"{head} changes |", f"{line}---|", *changes, ""])
