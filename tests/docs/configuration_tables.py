"""Makes the tables of the core's keys in docs/configuration.md out of the structs of `kvframework.config.schema`,
between comments:

    <!-- keys: ServerConfig -->
    <!-- end of keys -->
"""

from __future__ import annotations

import re

from kvframework.config import schema
from kvframework.registry.options import describe_options
from tests.docs.option_tables import rows

BLOCK = re.compile(r"(<!-- keys: (\w+) -->\n).*?(<!-- end of keys -->)", re.DOTALL)
STRUCTS = ("ServerConfig", "CurveConfig", "LogConfig", "ObserveConfig", "L1Keys", "L2Keys", "TenantKeys")


def renewed(page: str) -> str:
    """The page with its tables as the schema is."""
    return BLOCK.sub(lambda block: block[1] + rows(describe_options(getattr(schema, block[2])), "key") + block[3], page)
