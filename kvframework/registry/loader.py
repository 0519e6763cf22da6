"""The guarded steps from an entry point to provider descriptors, and to descriptions of their options. A plugin's
mistake becomes a `PluginError`, whose hint is for the plugin's author.

Runs once per plugin, at startup, in the thread that makes the registry. Only named plugins are imported.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import inspect

from kvframework.api.codec import MAX_CODEC_NAME
from kvframework.api.plugin import ENTRY_POINT_GROUP, ByteSize, Options, Provider
from kvframework.errors import PluginBroken, PluginError, PluginWrongKind
from kvframework.masking import secret_mark
from kvframework.overdue import timed
from kvframework.registry.discovery import KINDS, EntryPointInfo, check_requires

if TYPE_CHECKING:
    import pluggy


_BASIC: dict[type[inspect.Type], str] = {
    inspect.AnyType: "anything",
    inspect.BoolType: "boolean",
    inspect.IntType: "integer",
    inspect.FloatType: "number",
    inspect.StrType: "string",
    inspect.DateTimeType: "date and time",
    inspect.DateType: "date",
    inspect.TimeType: "time",
    inspect.StructType: "table",
    inspect.TypedDictType: "table",
}
_ARRAYS = (
    inspect.ListType,
    inspect.SetType,
    inspect.FrozenSetType,
    inspect.VarTupleType,
    inspect.CollectionType,
)


class OptionInfo(msgspec.Struct, frozen=True):
    """One field of a plugin's options. `default` means nothing while `required`."""

    name: str
    type: str
    required: bool
    default: object
    description: str
    secret: bool


def describe_options(options: type[msgspec.Struct]) -> list[OptionInfo]:
    """The fields of a struct of options or of the configuration, in their order."""
    struct = inspect.type_info(options)
    assert isinstance(struct, inspect.StructType)
    return [_describe(field) for field in struct.fields]


def _describe(field: inspect.Field) -> OptionInfo:
    default = field.default
    if field.default_factory is not msgspec.NODEFAULT:
        default = field.default_factory()
    metadata = field.type if isinstance(field.type, inspect.Metadata) else inspect.Metadata(field.type)
    return OptionInfo(
        name=field.encode_name,
        type=type_text(field.type),
        required=field.required,
        default=None if field.required else default,
        description=(metadata.extra_json_schema or {}).get("description", ""),
        secret=secret_mark(field.type) is not None,
    )


def type_text(kind: Any) -> str:
    """A type as readers of a TOML file know it, with its bounds."""
    if isinstance(kind, inspect.Metadata):
        return type_text(kind.type)
    if isinstance(kind, inspect.CustomType):
        return "size" if kind.cls is ByteSize else kind.cls.__name__
    if isinstance(kind, inspect.LiteralType):
        return " or ".join(f'"{value}"' if isinstance(value, str) else str(value) for value in kind.values)
    if isinstance(kind, inspect.EnumType):
        return " or ".join(f'"{member.value}"' for member in kind.cls)
    if isinstance(kind, inspect.UnionType):
        return " or ".join(type_text(each) for each in kind.types if not isinstance(each, inspect.NoneType))
    if isinstance(kind, _ARRAYS):
        return f"array of {type_text(kind.item_type)}"
    if isinstance(kind, inspect.TupleType):
        return f"array of {', '.join(type_text(each) for each in kind.item_types)}"
    if isinstance(kind, inspect.DictType):
        return f"table of {type_text(kind.value_type)}"
    return _BASIC.get(type(kind), type(kind).__name__.removesuffix("Type").lower()) + _bounds(kind)


def _bounds(kind: Any) -> str:
    if not isinstance(kind, (inspect.IntType, inspect.FloatType)):
        return ""
    if kind.ge is not None and kind.le is not None:
        return f" {kind.ge} to {kind.le}"
    bounds = ((">=", kind.ge), (">", kind.gt), ("<=", kind.le), ("<", kind.lt))
    limits = [f"{sign} {bound}" for sign, bound in bounds if bound is not None]
    return f" {' and '.join(limits)}" if limits else ""


AnyProvider = Provider[Any]


@contextmanager
def guarded(title: str, step: str, *, long: bool = False) -> Iterator[None]:
    """Turns any exception of a plugin's code into `PluginBroken`; only an interrupt from the keyboard passes. See
    `timed` for its bound."""
    try:
        with timed(title, step, long=long):
            yield
    except (PluginError, KeyboardInterrupt):
        raise
    except BaseException as error:
        cause = f"{type(error).__name__}: {error}".removesuffix(": ")
        raise PluginBroken(f"{title}: {step} failed with {cause}") from error


def import_plugin(offer: EntryPointInfo) -> object:
    """Imports the object that an entry point names. Raises `PluginBroken`."""
    with guarded(str(offer), "the import", long=True):
        return metadata.EntryPoint(offer.title, offer.value, ENTRY_POINT_GROUP).load()


def adopt(manager: pluggy.PluginManager, plugin: object, title: str) -> None:
    """Registers a plugin and checks its hooks, unless it is registered already: a module may have several entry points.

    Raises `PluginBroken`, and the plugin is then not registered.
    """
    with guarded(title, "its registration"):
        if manager.is_registered(plugin):
            return
        try:
            manager.register(plugin, name=f"{title} at {id(plugin):#x}")
            manager.check_pending()
        except BaseException:
            if manager.is_registered(plugin):
                manager.unregister(plugin)
            raise


def hooks_of(manager: pluggy.PluginManager, plugin: object) -> set[str]:
    """The names of the hooks that a registered plugin implements."""
    return {caller.name for caller in manager.get_hookcallers(plugin) or ()}


def offered(manager: pluggy.PluginManager, plugin: object, kind: str, title: str) -> list[AnyProvider]:
    """Calls the hook of `kind` of one plugin only. Raises `PluginBroken` and `PluginWrongKind`."""
    hook = KINDS[kind].hook
    others = [other for other in manager.get_plugins() if other is not plugin]
    with guarded(title, hook):
        results = manager.subset_hook_caller(hook, others)()
    providers: list[AnyProvider] = []
    for result in results:
        if not isinstance(result, list | tuple):
            raise PluginBroken(f"{title}: {hook} returned {type(result).__name__}", available="a list")
        providers.extend(_checked(provider, kind, title) for provider in result)
    return providers


def pick(manager: pluggy.PluginManager, plugin: object, offer: EntryPointInfo) -> AnyProvider:
    """The one provider that an entry point promises. Raises `PluginBroken`, `PluginWrongKind`, `PluginWrongApi`."""
    title, hook, implemented = str(offer), KINDS[offer.kind].hook, hooks_of(manager, plugin)
    if hook not in implemented:
        error = PluginWrongKind if implemented else PluginBroken
        raise error(
            f"{title}: it does not implement {hook}",
            available=", ".join(sorted(implemented)) or "no hook at all",
            hint=f"mark {hook} with @kvframework.api.plugin.hookimpl, or rename the entry point",
        )
    providers = offered(manager, plugin, offer.kind, title)
    matching = [provider for provider in providers if provider.name == offer.name]
    if len(matching) != 1:
        raise PluginBroken(
            f"{title}: {hook} returned {len(matching)} providers named {offer.name!r}",
            available=", ".join(sorted(provider.name for provider in providers)) or "no provider",
            hint="an entry point is named <kind>.<name>, after its one provider",
        )
    check_requires(matching[0].requires_api, title)
    return matching[0]


def probe(provider: AnyProvider, title: str) -> str | None:
    """The reason why the plugin cannot run here, or None. Raises `PluginBroken`."""
    with guarded(title, "its probe"):
        reason = provider.probe()
        if reason is not None and not isinstance(reason, str):
            raise TypeError(f"expected None or a text, found {type(reason).__name__}")
    return reason


def _checked(provider: object, kind: str, title: str) -> AnyProvider:
    hook, types = KINDS[kind]
    expected = " or ".join(each.__name__ for each in types)
    found = type(provider).__name__
    if not isinstance(provider, Provider):
        raise PluginBroken(f"{title}: {hook} returned a list with {found}", available=expected)
    if not isinstance(provider, types):
        raise PluginWrongKind(f"{title}: {hook} returned {found}", available=expected)
    if not (isinstance(provider.options, type) and issubclass(provider.options, Options)):
        raise PluginBroken(f"{title}: the options of {provider.name!r} are {provider.options!r}", available="Options")
    with guarded(title, f"reading the options of {provider.name!r}"):
        msgspec.msgpack.Decoder(provider.options)  # its annotations may use undefined names
    lacking = [
        field.name
        for field in dataclasses.fields(provider)
        if field.name.startswith("create")
        and field.default is dataclasses.MISSING
        and not callable(getattr(provider, field.name, None))
    ]
    if not isinstance(provider.name, str) or not provider.name or lacking:
        raise PluginBroken(
            f"{title}: {hook} returned a {found} without a name or {' and '.join(lacking) or 'create'}()"
        )
    if kind == "codec" and not (provider.name.isascii() and len(provider.name) <= MAX_CODEC_NAME):
        raise PluginBroken(
            f"{title}: the name of codec {provider.name!r} does not fit into a value's header",
            available=f"at most {MAX_CODEC_NAME} ASCII characters",
            hint="choose a shorter name",
        )
    return provider
