"""The parts that plugins of every kind share: the mark of a hook, the base of descriptors, options, and small types."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Generic, Literal, TypeVar

import pluggy
from msgspec import Meta, Struct

from kvframework.errors import BadDtype
from kvframework.masking import shown_options

__all__ = [
    "API_VERSION",
    "DTYPE_BYTES",
    "BlockIds",
    "Buffer",
    "ByteSize",
    "Finding",
    "Message",
    "NoOptions",
    "Options",
    "Provider",
    "Secret",
    "SecretUrl",
    "ServerTerms",
    "TableContext",
    "dtype_bytes",
    "hookimpl",
]

PROJECT = "kvframework"
ENTRY_POINT_GROUP = "kvframework.v1"
API_VERSION = (1, 0)

hookimpl = pluggy.HookimplMarker(PROJECT)

Buffer = bytes | bytearray | memoryview

# One list of block ids per layer group, in the order of the layout's groups.
BlockIds = Sequence[Sequence[int]]


class ByteSize(int):
    """A number of bytes; in TOML an integer or a string such as "512MiB", "1.5 GiB" or "10GB"."""

    _UNITS = {"": 1, "b": 1} | {
        f"{p}{u}": b**e for e, p in enumerate("kmgt", start=1) for u, b in (("", 1024), ("ib", 1024), ("b", 1000))
    }

    @classmethod
    def parse(cls, value: object) -> ByteSize:
        """Parse a size. Raises `ValueError` with the expected form."""
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return cls(value)
        if isinstance(value, str):
            match = re.fullmatch(r"\s*(\d{1,40}(?:\.\d{1,40})?)\s*([a-zA-Z]*)\s*", value)
            if match and match[2].lower() in cls._UNITS:
                return cls(int(float(match[1]) * cls._UNITS[match[2].lower()]))
        raise ValueError(f'expected a size such as 1073741824, "512MiB" or "1GB", found {value!r}')

    def __str__(self) -> str:
        size = float(self)
        for unit in ("B", "KiB", "MiB", "GiB"):
            if size < 1024:
                return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
            size /= 1024
        return f"{size:.1f} TiB"


# Bytes of one element, by torch's name without the `torch.` prefix.
DTYPE_BYTES: dict[str, int] = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
}


def dtype_bytes(name: str) -> int:
    """Return the bytes of one element of a dtype. Raises `BadDtype`."""
    try:
        return DTYPE_BYTES[name]
    except KeyError:
        raise BadDtype(
            f"unknown dtype {name!r}", available=", ".join(DTYPE_BYTES), hint="leave out torch's prefix 'torch.'"
        ) from None


class Message(Struct, frozen=True, omit_defaults=True):
    """Base of every message on the wire: msgpack maps that evolve by adding defaulted fields, never by retyping."""


# The types of options that only the plugin may see. `Annotated[SecretUrl, msgspec.Meta(description=...)]` adds to them.
# A `Secret` is shown as "***"; a `SecretUrl` without user, password and query.
Secret = Annotated[str, Meta(extra={"secret": "value"})]
SecretUrl = Annotated[str, Meta(extra={"secret": "url"})]


class Options(Struct, frozen=True, forbid_unknown_fields=True):
    """Base of a plugin's own options: the keys of its TOML table besides the core's. A field's
    `msgspec.Meta(description=...)` is its documentation in `kvframework plugins info`. The repr hides values of type
    `Secret` and `SecretUrl`, and so does all output of the framework."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.__rich_repr__())})"

    def __rich_repr__(self) -> list[tuple[str, object]]:
        return list(shown_options(self).items())


class NoOptions(Options, frozen=True):
    """The options of a plugin without options."""


@dataclass(frozen=True)
class ServerTerms:
    """What a configuration's `[server]` says to its plugins: the tokens of the largest chunk, the endpoints at which
    the server listens, and whether it has CURVE keys, which admit clients over TCP."""

    chunk_size: int = 256
    endpoints: tuple[str, ...] = ()
    has_keys: bool = False


@dataclass(frozen=True)
class TableContext:
    """The TOML table for which `create`, `check` or `diagnose` is called. `where` is its place, for error texts.
    `replaces` is for `check`: the process of the server whose place the new one will take, None: no server runs. What
    that process holds, such as a lock, is free by then."""

    where: str
    replaces: int | None = None
    server: ServerTerms = ServerTerms()


Level = Literal["ok", "warn", "fail"]


class Finding(Struct, frozen=True):
    """The result of one check. `id` is stable, of the form "subject.thing", such as "redis.policy". `level` "fail": it
    will not work; "warn": it works, but badly or not for long. `fact` is the observation, with its numbers and without
    secrets; `advice` the one thing to do, "" for none; `where` the place in the TOML, from the doctor for plugins."""

    id: Annotated[str, Meta(pattern=r"^[a-z0-9_-]+(\.[a-z0-9_-]+)+$")]
    level: Level
    fact: str
    advice: str = ""
    where: str = ""


O = TypeVar("O", bound=Options)  # noqa: E741

# (options, TableContext, deadline): the report of `kvframework doctor` on a plugin's store or device.
Diagnose = Callable[[O, TableContext, float], Sequence[Finding]]

# (options, TableContext): raises what `create` would raise.
Check = Callable[[O, TableContext], None]


def always_available() -> str | None:
    """The default probe: the plugin can run."""
    return None


@dataclass(frozen=True, kw_only=True)
class Provider(Generic[O]):
    """Base of every descriptor.

    `name` is the part of the entry point after the kind. `options` validates the plugin's TOML table. `requires_api` is
    the lowest API version "major.minor" that the plugin needs. `probe` says why the plugin cannot run here (with the
    command that installs the missing part), or None; it must be quick and without side effects. `serve` and
    `config check` end with an error if the import, a hook, `probe`, `check` or `create` has not returned within 60 s.

    `check` is a function (options, TableContext) that raises the `KVFrameworkError` that `create` would raise, as far
    as that can be seen beforehand: a size beyond the machine, a folder that is none. `serve` calls it before it creates
    anything, `config check` and `kvframework doctor` call it for their reports. It changes nothing, takes no lock, and
    blocks for a second at most.
    """

    kind: ClassVar[str]

    name: str
    summary: str
    options: type[O] = NoOptions  # type: ignore[assignment]
    requires_api: str = "1.0"
    probe: Callable[[], str | None] = always_available
    check: Check[O] | None = None
