"""A configuration against the plugins: every table names a working plugin and fits its options; the guarded call of a
provider's `create`; and descriptions of options."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

import msgspec
from msgspec import inspect as types
from msgspec.structs import replace

from kvframework.api.codec import NO_CODEC, CodecProvider
from kvframework.api.eviction import EvictionProvider
from kvframework.api.hasher import HasherProvider
from kvframework.api.layout import LayoutProvider
from kvframework.api.listener import ListenerProvider
from kvframework.api.memory import MemoryProvider
from kvframework.api.plugin import ByteSize, Options, Provider, ServerTerms, TableContext
from kvframework.api.requests import RequestsProvider
from kvframework.api.tier import TierProvider
from kvframework.api.transport import TransportProvider
from kvframework.bounded_calls import named_at, timed
from kvframework.config.endpoint import default_endpoint
from kvframework.config.schema import Config, PluginTable
from kvframework.errors import ConfigFieldError, KVFrameworkError, PluginBroken, PluginUnavailable
from kvframework.masking import secret_mark
from kvframework.registry.registry import PluginRegistry
from kvframework.text import described

_HINT = "report the error to the plugin's author; run `kvframework plugins check` for details"


def declared_attributes(contract: type[Any]) -> list[str]:
    names = dict.fromkeys(name for each in contract.__mro__ for name in inspect.get_annotations(each))
    return [name for name in names if not name.startswith("_")]


class Creator:
    """Makes the objects of one configuration, in the thread that needs them. Each call blocks for as long as the plugin
    does. A `KVFrameworkError` is the plugin's own error and passes, with the table's place if it names none; any other
    exception or a wrong result becomes a `PluginBroken` that names the plugin and its table."""

    def __init__(self, registry: PluginRegistry) -> None:
        self._registry = registry

    def one(self, kind: str, table: PluginTable, contract: type[Any], create: Callable[..., object], *args: Any) -> Any:
        """The result of `create(*args)`, a `contract`."""
        made = self.call(kind, table, create, *args)
        if not isinstance(made, contract):
            raise self._broken(kind, table, f"create returned {type(made).__name__}", contract.__name__)
        lacking = [name for name in declared_attributes(contract) if not hasattr(made, name)]
        if lacking:
            raise self._broken(kind, table, f"the result of create has no {', '.join(lacking)}", contract.__name__)
        return made

    def several(
        self, kind: str, table: PluginTable, contract: type[Any], create: Callable[..., object], *args: Any
    ) -> list[Any]:
        """The result of `create(*args)`, a list or tuple of `contract`."""
        made = self.call(kind, table, create, *args)
        expected = f"a list of {contract.__name__}"
        if not isinstance(made, list | tuple):
            raise self._broken(kind, table, f"create returned {type(made).__name__}", expected)
        for each in made:
            if not isinstance(each, contract):
                raise self._broken(kind, table, f"create returned a list of {type(each).__name__}", expected)
        return list(made)

    def call(
        self, kind: str, table: PluginTable, function: Callable[..., object], *args: Any, name: str = "create"
    ) -> object:
        """The result of `function(*args)`, of any type."""
        try:
            with named_at(table.where), timed(self._title(kind, table), name):
                return function(*args)
        except KVFrameworkError as error:
            error.where = error.where or table.where
            raise
        except (Exception, SystemExit) as error:
            raise self._broken(kind, table, f"{name} raised {described(error)}") from error

    def _broken(self, kind: str, table: PluginTable, fact: str, available: str = "") -> PluginBroken:
        title = self._title(kind, table)
        return PluginBroken(f"{title}: {fact}", where=table.where, available=available, hint=_HINT)

    def _title(self, kind: str, table: PluginTable) -> str:
        offer = self._registry.offer(kind, table.use)
        return f"{offer.title} ({offer.origin})"


P = TypeVar("P", bound=Provider[Any])


def resolve_table(registry: PluginRegistry, table: PluginTable, descriptor: type[P]) -> tuple[P, Options]:
    """The provider that a table names, and its validated options. `descriptor` is the class of providers of the table's
    kind. Blocking: may import the plugin. Raises `PluginError` and `ConfigFieldError` with the table's place."""
    try:
        provider = cast("P", registry.resolve(descriptor.kind, table.use, where=table.where))
    except PluginUnavailable:
        # A mistake in a table is one on every machine, so its error comes first.
        _, found = registry.describe(descriptor.kind, table.use)
        if found is not None:
            registry.options(found, table.options, where=table.where, core_keys=table.core_keys)
        raise
    return provider, registry.options(provider, table.options, where=table.where, core_keys=table.core_keys)


def codec_tables(config: Config) -> list[PluginTable]:
    """The codecs that a configuration names, each once, with the options of its `[codecs.NAME]`; without `none`, which
    the core implements itself. Raises `ConfigFieldError` for options of a codec that no table uses."""
    named = {l2.keys.codec: f"{l2.tier.where} codec" for l2 in reversed(config.l2)}
    named = dict.fromkeys(config.codecs.allow, f"{config.codecs.where} allow") | named
    named.pop(NO_CODEC, None)
    given = {table.use: table for table in config.codecs.options}
    for name, table in given.items():
        if name not in named:
            fact = f"codec {name!r} is not configured"
            hint = f'write codec = "{name}" into an [[l2]] table, or allow = ["{name}"] into [codecs]'
            raise ConfigFieldError(fact, where=table.where, available=", ".join(named) or "no codec", hint=hint)
    return [given.get(name, PluginTable(name, {}, where)) for name, where in named.items()]


def named_tables(config: Config) -> list[tuple[PluginTable, type[Provider[Any]]]]:
    """Every table that names a plugin, with the descriptor of its kind; of codecs those of `codec_tables`."""
    tables: list[tuple[PluginTable, type[Provider[Any]]]] = []

    def collect(table: PluginTable, descriptor: type[Provider[Any]]) -> PluginTable:
        tables.append((table, descriptor))
        return table

    codecs: list[PluginTable] = []
    with contextlib.suppress(ConfigFieldError):
        codecs = codec_tables(config)
    _with_tables(config, codecs, collect)
    return tables


def complete_config(
    config: Config, registry: PluginRegistry, form: Callable[[Options], dict[str, object]] = msgspec.structs.asdict
) -> Config:
    """The configuration with every option of every plugin, defaults too, in the given form, and the endpoint: two that
    mean the same are equal then. Blocking. Raises `PluginError`, `ConfigFieldError`."""

    def complete(table: PluginTable, descriptor: type[Provider[Any]]) -> PluginTable:
        return replace(table, options=form(resolve_table(registry, table, descriptor)[1]))

    made = _with_tables(config, codec_tables(config), complete)
    return replace(made, server=replace(made.server, endpoint=made.server.endpoint or default_endpoint()))


def _with_tables(
    config: Config, codecs: Iterable[PluginTable], changed: Callable[[PluginTable, type[Provider[Any]]], PluginTable]
) -> Config:
    """The configuration with each table that names a plugin as `changed` returns it."""
    l1 = config.l1
    return replace(
        config,
        l1=replace(l1, memory=changed(l1.memory, MemoryProvider), eviction=changed(l1.eviction, EvictionProvider)),
        hasher=changed(config.hasher, HasherProvider),
        transport=tuple(changed(table, TransportProvider) for table in config.transport),
        layout=tuple(changed(table, LayoutProvider) for table in config.layout),
        l2=tuple(replace(l2, tier=changed(l2.tier, TierProvider)) for l2 in config.l2),
        codecs=replace(config.codecs, options=tuple(changed(table, CodecProvider) for table in codecs)),
        requests=tuple(changed(table, RequestsProvider) for table in config.requests),
        listener=tuple(changed(table, ListenerProvider) for table in config.listener),
    )


def server_terms(config: Config) -> ServerTerms:
    server = config.server
    endpoints = tuple(each for each in (server.endpoint or default_endpoint(), server.tcp) if each)
    return ServerTerms(server.most_chunk, endpoints, server.curve is not None)


def check_table(
    registry: PluginRegistry,
    table: PluginTable,
    provider: Provider[Any],
    options: Options,
    *,
    server: ServerTerms,
    replaces: int | None = None,
    kept: bool = False,
) -> None:
    """Call the provider's own check. The server of process `replaces`, or a keeper (`kept`), holds memory that the new
    one will have or free, so the memory plugin is not asked for as much again. Raises the plugin's `KVFrameworkError`,
    or `PluginBroken`. Blocking."""
    held = kept or replaces is not None
    if provider.check is None or (held and isinstance(provider, MemoryProvider)):
        return
    context = TableContext(table.where, replaces, server)
    Creator(registry).call(provider.kind, table, provider.check, options, context, name="check")


_BASIC: dict[type[types.Type], str] = {
    types.AnyType: "anything",
    types.BoolType: "boolean",
    types.IntType: "integer",
    types.FloatType: "number",
    types.StrType: "string",
    types.StructType: "table",
    types.TypedDictType: "table",
}


class OptionInfo(msgspec.Struct, frozen=True):
    """One field of a plugin's options. `default` means nothing while `required`."""

    name: str
    type: str
    required: bool
    default: object
    description: str
    secret: bool


def describe_options(options: type[msgspec.Struct]) -> list[OptionInfo]:
    struct = types.type_info(options)
    assert isinstance(struct, types.StructType)
    return [_describe(field) for field in struct.fields]


def _describe(field: types.Field) -> OptionInfo:
    default = field.default
    if field.default_factory is not msgspec.NODEFAULT:
        default = field.default_factory()
    metadata = field.type if isinstance(field.type, types.Metadata) else types.Metadata(field.type)
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
    if isinstance(kind, types.Metadata):
        return type_text(kind.type)
    if isinstance(kind, types.CustomType):
        return "size" if kind.cls is ByteSize else kind.cls.__name__
    if isinstance(kind, types.LiteralType):
        return " or ".join(f'"{value}"' if isinstance(value, str) else str(value) for value in kind.values)
    if isinstance(kind, types.EnumType):
        return " or ".join(f'"{member.value}"' for member in kind.cls)
    if isinstance(kind, types.UnionType):
        return " or ".join(type_text(each) for each in kind.types if not isinstance(each, types.NoneType))
    if isinstance(kind, types.CollectionType):
        return f"array of {type_text(kind.item_type)}"
    if isinstance(kind, types.TupleType):
        return f"array of {', '.join(type_text(each) for each in kind.item_types)}"
    if isinstance(kind, types.DictType):
        return f"table of {type_text(kind.value_type)}"
    return _BASIC.get(type(kind), type(kind).__name__.removesuffix("Type").lower()) + _bounds(kind)


def _bounds(kind: Any) -> str:
    if not isinstance(kind, (types.IntType, types.FloatType)):
        return ""
    if kind.ge is not None and kind.le is not None:
        return f" {kind.ge} to {kind.le}"
    bounds = ((">=", kind.ge), (">", kind.gt), ("<=", kind.le), ("<", kind.lt))
    limits = [f"{sign} {bound}" for sign, bound in bounds if bound is not None]
    return f" {' and '.join(limits)}" if limits else ""
