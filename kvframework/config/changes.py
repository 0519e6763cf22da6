"""The differences between two configurations, and which keys a running server changes. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple

import msgspec

from kvframework.config.schema import CodecsConfig, Config, PluginTable, TenantConfig

When = Literal["now", "restart"]

# The keys that a running server changes; any other needs a restart. A number in the place of a table is left out.
CHANGED_NOW = frozenset(
    {
        "log.level",
        "log.format",
        "server.store_lease_s",
        "server.retrieve_lease_s",
        "server.store_share",
        "server.pin_share",
        "server.ticket_s",
        "server.price",
        "server.session_timeout_s",
        "server.trace_memory",
        "l1.high_watermark",
        "l1.low_watermark",
        "l2.timeout_s",
        "l2.write_queue",
        "l2.promote",
        "l2.high_watermark",
        "l2.low_watermark",
    }
)
# Fields of the schema whose keys stand in the table around them.
_INLINE = ("memory", "tier", "keys")


class Change(NamedTuple):
    """A key such as `l2.0.timeout_s`, as `--set` names it, and its values; None: not set."""

    key: str
    old: object
    new: object
    when: When


def changes(old: Config, new: Config) -> list[Change]:
    """The keys whose values differ, in the order of `old`. The options of plugins are compared as they stand in both:
    give both complete, see `kvframework.registry.complete_config`."""
    before, after = flat(old), flat(new)
    return [
        Change(key, before.get(key), after.get(key), "restart" if key not in before or key not in after else when(key))
        for key in before | after
        if before.get(key) != after.get(key)
    ]


def when(key: str) -> When:
    """When a change of the key takes effect. An unknown key, such as an option of a plugin, needs a restart."""
    name = ".".join(part for part in key.split(".") if not part.isdecimal())
    return "now" if name in CHANGED_NOW else "restart"


def flat(config: Config) -> dict[str, object]:
    """Every value that is set, by its key as `--set` names it."""
    return {key: value for key, value in _keys("", config) if key != "source" and value is not None}


def _keys(path: str, value: object) -> Iterator[tuple[str, object]]:
    prefix = f"{path}." if path else ""
    if isinstance(value, PluginTable):
        yield f"{prefix}use", value.use
        yield from ((f"{prefix}{name}", each) for name, each in value.options.items())
    elif isinstance(value, CodecsConfig):
        yield f"{prefix}allow", value.allow
        for table in value.options:
            yield from ((f"{prefix}{table.use}.{name}", each) for name, each in table.options.items())
    elif isinstance(value, msgspec.Struct):
        for name in value.__struct_fields__:
            yield from _keys(path if name in _INLINE else f"{prefix}{name}", getattr(value, name))
    elif isinstance(value, tuple) and any(isinstance(each, msgspec.Struct) for each in value):
        for index, each in enumerate(value):
            named = isinstance(each, TenantConfig)
            yield from _keys(f"{prefix}{each.name if named else index}", each.keys if named else each)
    elif isinstance(value, Mapping):
        for name, each in value.items():
            yield from _keys(f"{prefix}{name}", each)
    else:
        yield path, value
