"""Types of a plugin's options: their base, sizes in bytes, and secrets."""

from __future__ import annotations

import re
from typing import Annotated

import msgspec

from kvframework.masking import shown_options

__all__ = ["ByteSize", "NoOptions", "Options", "Secret", "SecretUrl"]

# The types of options that only the plugin may see. `Annotated[SecretUrl, msgspec.Meta(description=...)]` adds to them.
# A `Secret` is shown as "***"; a `SecretUrl` without user, password and query.
Secret = Annotated[str, msgspec.Meta(extra={"secret": "value"})]
SecretUrl = Annotated[str, msgspec.Meta(extra={"secret": "url"})]


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of a plugin's own options: the keys of its TOML table besides the core's.

    A field's `msgspec.Meta(description=...)` is its documentation in `kvframework plugins info`. The repr hides values
    of type `Secret` and `SecretUrl`, and so does all output of the framework.
    """

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.__rich_repr__())})"

    def __rich_repr__(self) -> list[tuple[str, object]]:
        return list(shown_options(self).items())


class NoOptions(Options, frozen=True):
    """The options of a plugin without options."""


class ByteSize(int):
    """A number of bytes; in TOML an integer or a string such as "512MiB", "1.5 GiB" or "10GB"."""

    _UNITS = {"": 1, "b": 1} | {
        f"{p}{u}": b**e for e, p in enumerate("kmgt", start=1) for u, b in (("", 1024), ("ib", 1024), ("b", 1000))
    }

    @classmethod
    def parse(cls, value: object) -> ByteSize:
        """Parses a size. Raises `ValueError` with the expected form."""
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
