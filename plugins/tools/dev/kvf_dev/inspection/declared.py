"""The check of a provider's own declarations: summary, probe, options. Does not call `create`. Runs in the inspecting
process."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from msgspec import inspect

from kvf_dev.inspection.problems import Problem, problem
from kvframework.api.memory import MemoryProvider
from kvframework.api.options import ByteSize, Options
from kvframework.api.tier import TierProvider
from kvframework.config import convert, toml_value
from kvframework.config.schema import L1Keys, L2Keys
from kvframework.errors import ConfigFieldError, PluginError
from kvframework.registry import loader
from kvframework.registry.loader import AnyProvider, describe_options


def declared_problems(provider: AnyProvider, title: str) -> Iterator[Problem]:
    """Problems that show without calling anything but the probe."""
    if not isinstance(provider.summary, str) or not provider.summary.strip():
        yield problem(
            "no-summary",
            title,
            "its summary is empty",
            expected="a line of text",
            hint="`kvframework plugins info` shows it",
        )
    try:
        loader.probe(provider, title)
    except PluginError as error:
        yield problem(
            "probe-fails",
            title,
            error.fact.removeprefix(f"{title}: "),
            expected="None, or why it cannot run here",
            hint="find out with importlib.util.find_spec, without an import",
        )
    yield from _option_problems(provider, title)


def core_keys(provider: AnyProvider) -> tuple[str, ...]:
    """The keys that the core takes from a provider's table."""
    if isinstance(provider, MemoryProvider):
        return ("use", "eviction", *L1Keys.__struct_fields__)
    return ("use", *L2Keys.__struct_fields__) if isinstance(provider, TierProvider) else ("use",)


def _option_problems(provider: AnyProvider, title: str) -> Iterator[Problem]:
    reserved = core_keys(provider)
    struct = inspect.type_info(provider.options)
    assert isinstance(struct, inspect.StructType)
    for option, field in zip(describe_options(provider.options), struct.fields, strict=True):
        place = f"{title}: {provider.options.__name__}.{field.name}"
        if not option.description.strip():
            yield problem(
                "undocumented-option",
                place,
                "the option has no description",
                expected=f"{field.name}: Annotated[..., msgspec.Meta(description=...)]",
                hint="`kvframework plugins info` shows it",
            )
        if option.name in reserved:
            yield problem(
                "reserved-option",
                place,
                f"{option.name} is a key of the core: the plugin never sees it",
                expected=f"a name that is none of {', '.join(reserved)}",
                hint="rename the option",
            )
        if _unreadable(field.type):
            yield problem(
                "unreadable-option",
                place,
                f"no TOML value can be read as {option.type}",
                expected="a type that msgspec reads by itself, or ByteSize",
                hint="take a string, and build the rest from it in `create`",
            )
        elif not option.required and (reason := _wrong_default(provider.options, option.name, option.default)):
            yield problem(
                "wrong-default",
                place,
                reason,
                expected="a value that TOML can express, within the option's bounds",
                hint="take a text, number, boolean, array, table or None, and make the rest of it in `create`",
            )


def _unreadable(kind: inspect.Type) -> bool:
    if isinstance(kind, inspect.Metadata):
        return _unreadable(kind.type)
    if isinstance(kind, inspect.UnionType):
        return any(map(_unreadable, kind.types))
    return isinstance(kind, inspect.CustomType) and kind.cls is not ByteSize


def _wrong_default(options: type[Options], name: str, default: object) -> str:
    """The reason why the default is no possible TOML value, or ""."""
    if default is not None:
        try:
            toml_value(msgspec.to_builtins(default, enc_hook=_plain))
        except TypeError:
            return f"its default is a {type(default).__name__}, which TOML cannot express"
    field = next(each for each in msgspec.structs.fields(options) if each.encode_name == name)
    one = msgspec.defstruct("One", [(field.name, field.type)], bases=(Options,), frozen=True, rename={field.name: name})
    try:
        plain = msgspec.to_builtins(default, enc_hook=_plain)
        read = getattr(convert({name: plain}, one, where=name), field.name)
    except NotImplementedError:
        return ""  # its type has no conversion from plain values, so the default cannot be checked here
    except ConfigFieldError as error:
        return f"its default {default!r} is refused: {error.fact}"
    return "" if read == default else f"its default {default!r} comes back as {read!r}"


def _plain(value: object) -> object:
    if isinstance(value, ByteSize):
        return int(value)
    raise NotImplementedError(type(value).__name__)
