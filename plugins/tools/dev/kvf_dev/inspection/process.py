"""The inspecting process: imports one plugin, checks what it declares (hooks by pluggy's rules, a provider's summary,
probe and options), makes its objects, and reports each step before it takes it. `inspector` starts it, and reads."""

from __future__ import annotations

import difflib
import inspect
import os
import re
import sys
import typing
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from typing import Any, NamedTuple

import msgspec
import pluggy
from msgspec import inspect as types

from kvf_dev.inspection.problems import Line, Problem, Target, problem
from kvframework.api import hookspecs
from kvframework.api.codec import Codec
from kvframework.api.eviction import EvictionPolicy
from kvframework.api.hasher import KeyHasher
from kvframework.api.layout import Layout
from kvframework.api.listener import Listener, ListenerContext, ListenerProvider, ServerTerms
from kvframework.api.memory import Memory, MemoryContext, MemoryProvider, TableContext
from kvframework.api.plugin import ENTRY_POINT_GROUP, PROJECT, ByteSize, Options
from kvframework.api.requests import CacheServices, Handler, RequestsProvider
from kvframework.api.tier import Tier, TierProvider
from kvframework.api.toml import closest, convert, toml_value
from kvframework.api.transport import ServerTransport, TransferContext, TransportProvider
from kvframework.config.schema import L1Keys, L2Keys
from kvframework.errors import (
    ConfigFieldError,
    KVFrameworkError,
    NotRegistered,
    PluginError,
    PluginWrongApi,
    PluginWrongKind,
)
from kvframework.registry.discovery import KINDS
from kvframework.registry.plugin_check import AnyProvider, adopt, check_requires, hooks_of, offered, probed
from kvframework.registry.tables import declared_attributes, describe_options

_HOOKS = [kind.hook for kind in KINDS.values()]
_MARK = f"{PROJECT}_impl"
_PREFIX = "kvf_"
WHERE = "plugins check"


def main() -> None:
    """Read a `Target` from standard input; `argv[1]` is the report's descriptor."""
    target = msgspec.json.decode(sys.stdin.buffer.read(), type=Target)
    descriptor = int(sys.argv[1])
    for line in _inspect(target):
        os.write(descriptor, msgspec.json.encode(line) + b"\n")


def _inspect(target: Target) -> Iterator[Line]:
    yield Line(step="import")
    plugin = metadata.EntryPoint("inspected", target.value, ENTRY_POINT_GROUP).load()
    found = list(hook_problems(plugin, target.value))
    yield from _lines(found)
    if any(each.severity == "error" for each in found):
        yield Line(note=f"{target.value}: its hooks were not called, because they must be fixed first")
        return
    yield Line(step="hooks")
    providers: dict[str, AnyProvider] = {}
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(hookspecs)
    try:
        adopt(manager, plugin, target.value)
        for kind in (kind for kind in KINDS if KINDS[kind].hook in hooks_of(manager, plugin)):
            for provider in offered(manager, plugin, kind, target.value):
                providers[f"{kind}.{provider.name}"] = provider
    except PluginError as error:
        yield Line(problem=_of_loader(error, target.value))
        return
    yield from _lines(_entry_points(target, providers))
    for title, provider in providers.items():
        if target.chosen in ("", title):
            yield Line(provider=title)
            yield from _provider(provider, title, target.options)


def _entry_points(target: Target, providers: dict[str, AnyProvider]) -> Iterator[Problem]:
    if not target.offers:
        return
    titles = {offer.title for offer in target.offers}
    for offer in target.offers:
        if offer.title not in providers and offer.kind in KINDS and target.chosen in ("", offer.title):
            yield problem(
                "entry-point-name",
                offer.title,
                f"no provider of {target.value} has that kind and name",
                expected=", ".join(providers) or "a provider",
                hint=closest(offer.title, providers) or "rename one of them",
            )
    for title in providers:
        if title not in titles and not target.chosen:
            yield problem(
                "no-entry-point",
                title,
                expected=f'"{title}" = "{target.value}"',
                hint=f'write it into [project.entry-points."{ENTRY_POINT_GROUP}"]',
            )


def _provider(provider: AnyProvider, title: str, options: Mapping[str, object]) -> Iterator[Line]:
    try:
        check_requires(provider.requires_api, title)
    except PluginError as error:
        yield Line(problem=_of_loader(error, title))
    yield Line(step=f"the probe of {title}")
    yield from _lines(declared_problems(provider, title))
    wrong = list(maker_problems(provider, title))
    yield from _lines(wrong)
    if wrong:
        yield Line(note=f"{title}: nothing was created, because `create` must be fixed first")
        return
    for maker in makers(provider):
        function = getattr(provider, maker.name)
        if function is None or maker.name == "diagnose":
            continue
        made_class = declared_class(function, maker.contract) if maker.contract else None
        if maker.name == "create":
            yield Line(step=f"create of {title}")
            try:
                made, problems = make(provider, maker, title, options)
            except NotMade as reason:
                known = f"its class {made_class.__name__} was checked instead" if made_class else ""
                yield Line(
                    note=f"{title}: none was created here: {reason}; {known or 'the conformance kit checks the rest'}"
                )
            else:
                yield from _lines(problems)
                if made is not None and maker.contract is not None:
                    made_class = type(made)
                    yield from _lines(attribute_problems(made, maker.contract, title))
        if made_class is not None and maker.contract is not None:
            yield from _lines(class_problems(made_class, maker.contract, title))


def _of_loader(error: PluginError, where: str) -> Problem:
    kinds = {PluginWrongApi: "api-version", PluginWrongKind: "wrong-kind"}
    name = kinds.get(type(error), "hook-fails")
    fact = error.fact.removeprefix(f"{where}: ").removeprefix(f"{where} is ")
    hint = error.hint or "a hook returns a list of provider descriptors of its own kind"
    if isinstance(error, PluginWrongApi):
        hint = "lower requires_api to what the plugin uses, or check it with a kvframework that has this API"
    return problem(name, where, fact, expected=error.available, hint=hint)


def _lines(problems: Iterator[Problem] | list[Problem]) -> Iterator[Line]:
    return (Line(problem=each) for each in problems)


def hook_problems(plugin: object, where: str) -> Iterator[Problem]:
    """Problems of everything in `plugin`, a module or an object, that is a hook implementation or looks like one."""
    marked = 0
    for name, function in _functions(plugin):
        options = getattr(function, _MARK, None)
        place = f"{where}.{name}"
        if options is None:
            if name.startswith(_PREFIX) and _defined_here(function, plugin) and (meant := _meant(name)):
                yield problem("unmarked-hook", place, expected=f"@hookimpl before def {meant}()")
            continue
        marked += 1
        hook = options.get("specname") or name
        if hook not in _HOOKS:
            meant = _meant(hook)
            yield problem(
                "misspelt-hook",
                place,
                f"there is no hook {hook}",
                expected=", ".join(_HOOKS),
                hint=f"did you mean {meant}?" if meant else "rename it",
            )
        yield from _shape_problems(function, place)
    if not marked:
        yield problem("no-hook", where, expected=" or ".join(_HOOKS))


def _functions(plugin: object) -> Iterator[tuple[str, Callable[..., Any]]]:
    for name in dir(plugin):
        try:
            value = getattr(plugin, name)
        except Exception:  # noqa: BLE001, S112  a property of the plugin's; pluggy passes over it as well
            continue
        if inspect.isroutine(value):
            yield name, value


def _defined_here(function: Callable[..., Any], plugin: object) -> bool:
    return not inspect.ismodule(plugin) or getattr(function, "__module__", None) == plugin.__name__


def _meant(name: str) -> str:
    return next(iter(difflib.get_close_matches(name, _HOOKS, n=1, cutoff=0.7)), "")


def _shape_problems(function: Callable[..., Any], place: str) -> Iterator[Problem]:
    kinds = (inspect.iscoroutinefunction, inspect.isasyncgenfunction, inspect.isgeneratorfunction)
    if any(is_kind(function) for is_kind in kinds):
        yield problem("async-hook", place)
    if parameters := inspect.signature(function).parameters:
        yield problem("hook-arguments", place, f"it takes {', '.join(parameters)}")


def declared_problems(provider: AnyProvider, title: str) -> Iterator[Problem]:
    """Problems that show without calling anything but the probe."""
    if not isinstance(provider.summary, str) or not provider.summary.strip():
        yield problem("no-summary", title)
    try:
        probed(provider, title)
    except PluginError as error:
        yield problem("probe-fails", title, error.fact.removeprefix(f"{title}: "))
    yield from _option_problems(provider, title)


def core_keys(provider: AnyProvider) -> tuple[str, ...]:
    """The keys that the core takes from a provider's table."""
    if isinstance(provider, MemoryProvider):
        return ("use", "eviction", *L1Keys.__struct_fields__)
    return ("use", *L2Keys.__struct_fields__) if isinstance(provider, TierProvider) else ("use",)


def _option_problems(provider: AnyProvider, title: str) -> Iterator[Problem]:
    reserved = core_keys(provider)
    struct = types.type_info(provider.options)
    assert isinstance(struct, types.StructType)
    for option, field in zip(describe_options(provider.options), struct.fields, strict=True):
        place = f"{title}: {provider.options.__name__}.{field.name}"
        if not option.description.strip():
            yield problem(
                "undocumented-option", place, expected=f"{field.name}: Annotated[..., msgspec.Meta(description=...)]"
            )
        if option.name in reserved:
            yield problem(
                "reserved-option",
                place,
                f"{option.name} is a key of the core: the plugin never sees it",
                expected=f"a name that is none of {', '.join(reserved)}",
            )
        if _unreadable(field.type):
            yield problem("unreadable-option", place, f"no TOML value can be read as {option.type}")
        elif not option.required and (reason := _wrong_default(provider.options, option.name, option.default)):
            yield problem("wrong-default", place, reason)


def _unreadable(kind: types.Type) -> bool:
    if isinstance(kind, types.Metadata):
        return _unreadable(kind.type)
    if isinstance(kind, types.UnionType):
        return any(map(_unreadable, kind.types))
    return isinstance(kind, types.CustomType) and kind.cls is not ByteSize


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


class Maker(NamedTuple):
    """One function of a provider that makes an object, the number of arguments that the core passes, and the contract
    of the result."""

    name: str
    arguments: int
    contract: type[Any] | None


_MAKERS: dict[str, tuple[Maker, ...]] = {
    "TransportProvider": (
        Maker("create", 2, TransferContext),
        Maker("create_server", 2, ServerTransport),
        Maker("diagnose", 3, None),
    ),
    "LayoutProvider": (Maker("create", 1, Layout),),
    "MemoryProvider": (Maker("create", 2, Memory), Maker("diagnose", 3, None)),
    "TierProvider": (Maker("create", 2, Tier), Maker("diagnose", 3, None)),
    "EvictionProvider": (Maker("create", 1, EvictionPolicy),),
    "HasherProvider": (Maker("create", 1, KeyHasher),),
    "CodecProvider": (Maker("create", 1, Codec),),
    "RequestsProvider": (Maker("create", 2, None),),
    "ListenerProvider": (Maker("create", 2, Listener),),
}


def makers(provider: AnyProvider) -> tuple[Maker, ...]:
    """The functions of a provider that the core calls, by its nearest class that is known here; of a device's transport
    those that its author wrote."""
    if hasattr(provider, "create_copier"):
        from kvf_devices import CopierDriver, EngineDriver

        engine, copier = Maker("create_engine", 1, EngineDriver), Maker("create_copier", 3, CopierDriver)
        return engine, copier, Maker("diagnose", 3, None)
    return next(_MAKERS[each.__name__] for each in type(provider).__mro__ if each.__name__ in _MAKERS)


def maker_problems(provider: AnyProvider, title: str) -> Iterator[Problem]:
    for maker in makers(provider):
        function = getattr(provider, maker.name)
        if function is None:
            continue
        if not callable(function) or not _takes(function, [None] * maker.arguments, {}):
            yield problem(
                "wrong-signature",
                f"{title}: {maker.name}",
                f"it does not take {maker.arguments} arguments",
                expected=f"a function of {maker.arguments}, see {type(provider).__name__}",
                hint="fix its parameters",
            )
        if inspect.iscoroutinefunction(function):
            yield problem("async-method", f"{title}: {maker.name}")


def class_problems(made: type[Any], contract: type[Any], title: str) -> Iterator[Problem]:
    """Problems that the core would have with objects of `made`."""
    for name in sorted(getattr(made, "__abstractmethods__", ())):
        yield problem(
            "missing-method",
            f"{title}: {made.__name__}",
            f"it has no {name}()",
            expected=f"{name}{_text(contract, name)}",
            hint=f"implement it as {contract.__name__} describes it",
        )
    for name, required in inspect.getmembers(contract, inspect.isfunction):
        own = inspect.getattr_static(made, name, None)
        if name.startswith("_") or own is required or own is None or getattr(own, "__isabstractmethod__", False):
            continue
        place = f"{title}: {made.__name__}.{name}"
        if inspect.iscoroutinefunction(own) or inspect.isasyncgenfunction(own):
            yield problem("async-method", place)
        elif inspect.isfunction(own) and not _serves(own, required):
            yield problem(
                "wrong-signature",
                place,
                f"it takes {inspect.signature(own)}",
                expected=f"{name}{inspect.signature(required)}",
                hint="take the parameters of the contract, by these names; more need defaults",
            )


def attribute_problems(made: object, contract: type[Any], title: str) -> Iterator[Problem]:
    """Attributes that the contract declares, and an object lacks."""
    for name in declared_attributes(contract):
        if not hasattr(made, name):
            yield problem(
                "missing-attribute",
                f"{title}: {type(made).__name__}",
                f"it has no attribute {name}",
                expected=f"{name}, see {contract.__name__}",
            )


def _serves(own: Callable[..., Any], required: Callable[..., Any]) -> bool:
    """True if `own` accepts every call that `required` accepts: in order, and by keyword."""
    parameters = list(inspect.signature(required).parameters.values())
    kinds = inspect.Parameter
    needed = [each for each in parameters if each.default is each.empty]
    ways = []
    for chosen in (parameters, needed):
        plain = [each for each in chosen if each.kind is kinds.POSITIONAL_OR_KEYWORD]
        only = {each.name: None for each in chosen if each.kind is kinds.KEYWORD_ONLY}
        ways.append(([None] * len(plain), only))
        # The core leaves out arguments with defaults and names the later ones.
        named = {each.name: None for each in plain if each.default is not each.empty}
        ways.append(([None] * (len(plain) - len(named)), only | named))
    return all(_takes(own, positional, by_name) for positional, by_name in ways)


def _takes(function: Callable[..., Any], positional: list[None], by_name: dict[str, None]) -> bool:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return True  # written in C: its signature is unknown
    try:
        signature.bind(*positional, **by_name)
    except TypeError:
        return False
    return True


def _text(contract: type[Any], name: str) -> str:
    found = getattr(contract, name, None)
    return str(inspect.signature(found)) if inspect.isfunction(found) else "()"


class NotMade(Exception):
    """The reason why no object could be made here; no fault of the plugin."""


def declared_class(function: Callable[..., Any], contract: type[Any]) -> type[Any] | None:
    """The class that `create` is or has as return type; None without one, or if it is only the contract."""
    if isinstance(function, type):
        return function
    try:
        kind = typing.get_type_hints(function).get("return")
    except Exception:  # noqa: BLE001  annotations may use names that are imported for type checkers only
        return None
    kind = typing.get_origin(kind) or kind
    return kind if isinstance(kind, type) and issubclass(kind, contract) and kind is not contract else None


def make(provider: AnyProvider, maker: Maker, title: str, given: Mapping[str, object]) -> tuple[object, list[Problem]]:
    """The result of `create` with the options `given`, defaults for the others; it stays open until the process ends.
    Raises `NotMade`, also if `create` refuses the defaults; its refusal of what was given is a problem."""
    if isinstance(provider, TransportProvider):
        raise NotMade("it needs an engine")
    if reason := provider.probe():
        raise NotMade(reason)
    fields = msgspec.structs.fields(provider.options)
    needed = [field.encode_name for field in fields if field.required and field.encode_name not in given]
    if needed:
        which = f"option {needed[0]} has" if len(needed) == 1 else f"options {', '.join(needed)} have"
        raise NotMade(f"its {which} no default, give {' '.join(f'--set {name}=VALUE' for name in needed)}")
    try:
        arguments: list[object] = [convert(given, provider.options, where="--set")]
    except ConfigFieldError as error:
        if given:
            return None, [_refused(title, error)]
        raise NotMade(f"{error.fact} [{error.code}]") from error
    if isinstance(provider, TierProvider):
        arguments.append(TableContext(where=WHERE))
    if isinstance(provider, MemoryProvider):
        arguments.append(MemoryContext(where=WHERE))
    if isinstance(provider, RequestsProvider):
        arguments.append(no_services())
    if isinstance(provider, ListenerProvider):
        arguments.append(_no_server())
    try:
        made = typing.cast("Any", provider).create(*arguments)
    except KVFrameworkError as error:
        if given:
            return None, [_refused(title, error)]
        raise NotMade(f"{error.fact} [{error.code}]") from error
    except Exception as error:  # noqa: BLE001  whatever a plugin raises
        abstract = re.search(r"instantiate abstract class (\w+)", str(error)) if isinstance(error, TypeError) else None
        if abstract is not None and maker.contract is not None:
            hint = f"implement it as {maker.contract.__name__} describes it"
            return None, [problem("missing-method", f"{title}: {abstract[1]}", str(error), hint=hint)]
        cause = " ".join(f"{type(error).__name__}: {error}".split())
        return None, [_fails(title, f"create() with {_of(given)} raises {cause}", maker)]
    if isinstance(provider, RequestsProvider):
        return made, list(_handler_problems(provider, made, title, maker))
    if maker.contract is not None and not isinstance(made, maker.contract):
        return None, [_fails(title, f"create() returns {type(made).__name__}", maker)]
    return made, []


def _of(given: Mapping[str, object]) -> str:
    return f"the options {', '.join(given)}" if given else "default options"


def _refused(title: str, error: KVFrameworkError) -> Problem:
    fact = f"none is made with --set: {error.fact} [{error.code}]"
    return problem("options-refused", title, fact, expected=error.available, hint=error.hint or "give other values")


def _fails(title: str, fact: str, maker: Maker) -> Problem:
    made = f"a {maker.contract.__name__}" if maker.contract else "a list of Handler"
    return problem("create-fails", title, fact, expected=made)


def _handler_problems(provider: AnyProvider, made: object, title: str, maker: Maker) -> Iterator[Problem]:
    if not isinstance(made, (list, tuple)) or not all(isinstance(each, Handler) for each in made):
        yield _fails(title, f"create() returns {type(made).__name__}", maker)
        return
    for handler in made:
        name = handler.spec.name
        if not name.startswith(f"{provider.name}."):
            yield problem(
                "create-fails",
                title,
                f"the request {name!r} is outside its namespace",
                expected=f"{provider.name}.NAME",
                hint="rename the request",
            )
        if inspect.iscoroutinefunction(handler.call):
            yield problem("async-method", f"{title}: {name}")


def no_services() -> CacheServices:
    """Services for handlers that are made and never called."""
    services: CacheServices = _unused(CacheServices, chunk_size=256, hasher=_no_hasher())
    return services


def _no_server() -> ListenerContext:
    """A server for a listener that is made and never started."""
    context: ListenerContext = _unused(ListenerContext, where=WHERE, server=ServerTerms(), hasher=_no_hasher())
    return context


def _no_hasher() -> KeyHasher:
    hasher: KeyHasher = _unused(KeyHasher, name="none", fingerprint="none")
    return hasher


def _unused(contract: type[Any], **attributes: object) -> Any:
    """An object of an abstract class that has these attributes, and whose methods all refuse."""

    def refuse(*_arguments: object, **_named: object) -> None:
        raise NotRegistered("a plugin under inspection has no server")

    methods = dict.fromkeys(contract.__abstractmethods__, refuse)
    return type(contract.__name__, (contract,), {**methods, **attributes})()
