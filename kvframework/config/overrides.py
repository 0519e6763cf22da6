"""`--set table.key=value`: single values that override the raw TOML before it is validated. Pure."""

from __future__ import annotations

from itertools import pairwise

from kvframework.config.toml import MOST_LEVELS, parse_toml
from kvframework.config.toml_excerpt import MOST_SHOWN
from kvframework.errors import ConfigFieldError, ConfigFileError

_HINT = "write table.key=value, for example l1.capacity=4GiB or l2.0.url=redis://localhost"


def apply_override(raw: dict[str, object], override: str) -> None:
    """Sets one value in `raw`, and creates missing tables. A number indexes an array of tables; one past its end
    appends.

    Raises `ConfigFieldError` if the override is malformed or its path does not exist.
    """
    keys, text = override_keys(override), override.partition("=")[2]
    node: object = raw
    for key, following in pairwise(keys):
        node = _descend(node, key, [] if following.isdecimal() else {}, override)
    _place(node, keys[-1], parse_value(text.strip()), override)


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


def _descend(node: object, key: str, empty: object, override: str) -> object:
    if isinstance(node, dict):
        return node.setdefault(key, empty)
    if isinstance(node, list):
        index = _index(node, key, override)
        if index == len(node):
            node.append(empty)
        return node[index]
    raise _refusal(override, f"goes through {key!r}, but its parent is a value, not a table")


def _place(node: object, key: str, value: object, override: str) -> None:
    if isinstance(node, dict):
        node[key] = value
    elif isinstance(node, list):
        index = _index(node, key, override)
        node[index:] = [value, *node[index + 1 :]]
    else:
        raise _refusal(override, f"sets {key!r} in a value that is not a table")


def _index(node: list[object], key: str, override: str) -> int:
    if not (key.isascii() and key.isdecimal()) or int(key) > len(node):
        raise _refusal(override, f"uses {key!r} to index an array of {len(node)}", available=f"0 to {len(node)}")
    return int(key)


def _refusal(override: str, fact: str, available: str = "") -> ConfigFieldError:
    # The value may be a secret.
    where = f"--set {override.partition('=')[0][:MOST_SHOWN]}"
    return ConfigFieldError(f"the override {fact}", where=where, available=available, hint=_HINT)
