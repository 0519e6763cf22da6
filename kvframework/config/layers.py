"""The layers of a configuration: default, file, `--set table.key=value`; merged in this order, with origins."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from kvframework.api.toml import MOST_LEVELS, MOST_SHOWN, parse_toml, read_toml
from kvframework.errors import ConfigFieldError, ConfigFileError

_HINT = "write table.key=value, for example l1.capacity=4GiB or l2.0.url=redis://localhost"


def apply_override(raw: dict[str, object], override: str) -> None:
    """Set one value in `raw`, and create missing tables. A number indexes an array of tables; one past its end
    appends. Raises `ConfigFieldError` if the override is malformed or its path does not exist."""
    keys, text = override_keys(override), override.partition("=")[2]
    node: object = raw
    for key, following in pairwise(keys):
        empty: object = [] if following.isdecimal() else {}
        if isinstance(node, dict):
            node = node.setdefault(key, empty)
        elif isinstance(node, list):
            index = _index(node, key, override)
            node[index:] = node[index:] or [empty]
            node = node[index]
        else:
            raise _refusal(override, f"leads through {key!r}, which lies in a value, not in a table")
    value, last = parse_value(text.strip()), keys[-1]
    if isinstance(node, dict):
        node[last] = value
    elif isinstance(node, list):
        index = _index(node, last, override)
        node[index : index + 1] = [value]
    else:
        raise _refusal(override, f"sets {last!r} in a value, not in a table")


def override_keys(override: str) -> tuple[str, ...]:
    """The path that an override sets. Raises `ConfigFieldError` if it is malformed."""
    path, separator, _ = override.partition("=")
    keys = tuple(key.strip() for key in path.split("."))
    if not separator or not all(keys):
        raise _refusal(override, "is not of the form table.key=value")
    if len(keys) > MOST_LEVELS:
        raise _refusal(override, f"names a key {len(keys)} levels deep", available=f"at most {MOST_LEVELS}")
    return keys


def parse_value(text: str) -> object:
    """`text` as a TOML value if it is one, else as a string."""
    try:
        parsed = parse_toml(f"value = {text}", where="")
    except (ConfigFileError, ConfigFieldError):
        return text
    # A line break in the text could have smuggled in further keys.
    return parsed["value"] if len(parsed) == 1 else text


def _index(node: list[object], key: str, override: str) -> int:
    if not (key.isascii() and key.isdecimal()) or int(key) > len(node):
        raise _refusal(override, f"uses {key!r} as the index of {len(node)} items", available=f"0 to {len(node)}")
    return int(key)


def _refusal(override: str, fact: str, available: str = "") -> ConfigFieldError:
    # The value may be a secret.
    where = f"--set {override.partition('=')[0][:MOST_SHOWN]}"
    return ConfigFieldError(f"the override {fact}", where=where, available=available, hint=_HINT)


DEFAULT_SOURCE = "embedded default"
DEFAULT_EVICTION = "two_queues"
DEFAULT_TOML = f"""
[server]
# endpoint: a private ipc:// socket, see kvframework.config.endpoint

[l1]
use = "pinned"
capacity = "1GiB"

[l1.eviction]
use = "{DEFAULT_EVICTION}"

[hasher]
use = "sha256"

[[transport]]
use = "cpu_gather"

[[layout]]
use = "paged"

[[layout]]
use = "opaque"

[[layout]]
use = "dynamic_cache"
"""
CONFIG_VARIABLE = "KVFRAMEWORK_CONFIG"
# The origin of a value that no layer sets: the default of its field.
FIELD_DEFAULT = "default"
KeyPath = tuple[str | int, ...]


class Layers(NamedTuple):
    """The layers. `raw` is the merged configuration. `by_variable`: the environment named the file."""

    raw: dict[str, object]
    own: dict[str, object]
    default: dict[str, object]
    file: Path | None
    by_variable: bool
    overrides: tuple[str, ...]

    @property
    def source(self) -> str:
        return str(self.file) if self.file is not None else DEFAULT_SOURCE

    @property
    def where(self) -> str:
        return f"{self.source} with --set" if self.overrides else self.source

    def origin(self, path: KeyPath, table: str) -> str:
        """The origin of the value at `path`; `table` is the title of its table, such as "[[l2]] #1". Never shows a
        value, which may be secret."""
        keys = tuple(str(key) for key in path)
        for override in reversed(self.overrides):
            changed = override_keys(override)
            if changed == keys[: len(changed)] or keys == changed[: len(keys)]:
                return f"--set {'.'.join(changed)}"
        if self.file is not None and _contains(self.own, path):
            return f"{self.source}{f' ({CONFIG_VARIABLE})' if self.by_variable else ''}: {table}"
        fell_back = self.file is None or not _contains(self.own, path[:1]) or path[-1] in ("use", "eviction")
        return DEFAULT_SOURCE if fell_back and _contains(self.default, path) else FIELD_DEFAULT


def read_layers(path: Path | None, overrides: Sequence[str], environ: Mapping[str, str]) -> Layers:
    """Read the layers. Blocking. Raises `ConfigFileError` and `ConfigFieldError` (of a malformed override)."""
    by_variable = path is None and bool(environ.get(CONFIG_VARIABLE))
    if by_variable:
        path = Path(environ[CONFIG_VARIABLE])
    layers = layers_of(read_toml(path) if path is not None else {})
    for override in overrides:
        apply_override(layers.raw, override)
    return layers._replace(file=path, by_variable=by_variable, overrides=tuple(overrides))


def layers_of(own: dict[str, object]) -> Layers:
    """The layers of what a file says, or would say. Missing tables are taken whole from the default. A table in the
    file keeps its own keys; only its choice of plugin may be left out."""
    default = parse_toml(DEFAULT_TOML, where=DEFAULT_SOURCE)
    merged = default | own
    for name in ("l1", "hasher"):
        table, fallback = merged[name], default[name]
        if isinstance(table, dict) and isinstance(fallback, dict):
            merged[name] = {key: fallback[key] for key in ("use", "eviction") if key in fallback} | table
    # Overrides change tables in place, and the lower layers must stay unchanged.
    return Layers(copy.deepcopy(merged), own, default, None, False, ())


def _contains(node: object, path: KeyPath) -> bool:
    for key in path:
        inside = key in node if isinstance(node, dict) else isinstance(node, list) and int(key) < len(node)
        if not inside:
            return False
        node = node[key]  # type: ignore[index]
    return True
