"""Options of plugins: how they are described, and what of them is shown."""

from __future__ import annotations

import enum
from typing import Annotated, Literal

import pytest
from msgspec import Meta
from rich.pretty import pretty_repr

from kvframework.api.plugin import ByteSize, NoOptions, Options, Secret, SecretUrl
from kvframework.masking import shown_options
from kvframework.registry.tables import OptionInfo, describe_options


class Mode(enum.Enum):
    fast = "fast"
    safe = "safe"


class Inner(Options, frozen=True):
    token: Secret = ""


class Everything(Options, frozen=True):
    url: Annotated[SecretUrl, Meta(min_length=1, description="where")]
    key: Secret = ""
    keys: tuple[Secret, ...] = ()
    size: ByteSize = ByteSize(1024)
    share: Annotated[float, Meta(gt=0, le=1)] = 0.5
    count: Annotated[int, Meta(ge=2)] = 2
    level: Literal["low", "high"] = "low"
    mode: Mode = Mode.fast
    hosts: list[str] = []  # noqa: RUF012 - msgspec copies it
    pair: tuple[int, str] = (1, "x")
    headers: dict[str, str] = {}  # noqa: RUF012
    maybe: bool | None = None
    inner: Inner = Inner()
    pin: Annotated[Secret | None, Meta(description="may be missing")] = None
    mirror: Annotated[SecretUrl | None, Meta(description="may be missing")] = None
    tokens: Annotated[dict[str, Secret], Meta(description="by host")] = {}  # noqa: RUF012
    chain: Annotated[list[Secret] | None, Meta(description="may be missing")] = None


def test_options_are_described_for_the_reader_of_a_toml_file() -> None:
    found = {option.name: option for option in describe_options(Everything)}
    assert found["url"] == OptionInfo("url", "string", True, None, "where", True)
    assert found["key"] == OptionInfo("key", "string", False, "", "", True)
    assert {name: option.type for name, option in found.items()} == {
        "url": "string",
        "key": "string",
        "keys": "array of string",
        "size": "size",
        "share": "number > 0 and <= 1",
        "count": "integer >= 2",
        "level": '"high" or "low"',
        "mode": '"fast" or "safe"',
        "hosts": "array of string",
        "pair": "array of integer, string",
        "headers": "table of string",
        "maybe": "boolean",
        "inner": "table",
        "pin": "string",
        "mirror": "string",
        "tokens": "table of string",
        "chain": "array of string",
    }
    secret = {"url", "key", "keys", "pin", "mirror", "tokens", "chain"}
    assert {name for name, option in found.items() if option.secret} == secret
    assert found["hosts"].default == []
    assert describe_options(NoOptions) == []


PASSWORD = "hunter2"


@pytest.mark.parametrize(
    ("options", "name", "shown"),
    [
        (Everything(url=f"x://me:{PASSWORD}@host/0?key={PASSWORD}"), "url", "x://***@host/0"),
        (Everything(url=f"nonsense {PASSWORD}"), "url", "***"),
        (Everything(url="x://host", key=PASSWORD), "key", "***"),
        (Everything(url="x://host", key=""), "key", ""),
        (Everything(url="x://host", hosts=[f"y://a:{PASSWORD}@b", "plain"]), "hosts", ["y://***@b", "plain"]),
        (Everything(url="x://host", headers={"via": f"y://:{PASSWORD}@b"}), "headers", {"via": "y://***@b"}),
        (Everything(url="x://host", inner=Inner(PASSWORD)), "inner", {"token": "***"}),
        (Everything(url="x://host", size=ByteSize(7)), "size", 7),
        (Everything(url="x://host", keys=(PASSWORD,)), "keys", ["***"]),
        (Everything(url="x://host", pin=PASSWORD), "pin", "***"),
        (Everything(url="x://host"), "pin", None),
        (Everything(url="x://host", mirror=f"y://a:{PASSWORD}@b"), "mirror", "y://***@b"),
        (Everything(url="x://host", tokens={"a": PASSWORD}), "tokens", {"a": "***"}),
        (Everything(url="x://host", chain=[PASSWORD]), "chain", ["***"]),
    ],
)
def test_secrets_are_neither_shown_nor_in_a_repr(options: Everything, name: str, shown: object) -> None:
    assert shown_options(options)[name] == shown
    assert PASSWORD not in repr(options) + pretty_repr(options)


def test_a_repr_of_harmless_options_is_the_usual_one() -> None:
    assert repr(NoOptions()) == "NoOptions()"
    assert repr(Everything(url="x://host")).startswith("Everything(url='x://host', key='', keys=[], size=1024, ")
