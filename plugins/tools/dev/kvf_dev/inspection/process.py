"""The inspecting process: imports one plugin, checks what it declares (hooks by pluggy's rules, a provider's summary,
probe and options), makes its objects, and reports each step before it takes it. `inspector` starts it, and reads."""

from __future__ import annotations

import difflib
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import metadata
from typing import Any

import msgspec
import pluggy
from msgspec import inspect as types

from kvf_dev.inspection.creation import created, signature_problems
from kvf_dev.inspection.problems import FORKED, Line, Problem, Target, measured, problem
from kvframework.api import hookspecs
from kvframework.api.memory import MemoryProvider
from kvframework.api.plugin import ENTRY_POINT_GROUP, PROJECT, ByteSize, Options
from kvframework.api.tier import TierProvider
from kvframework.api.toml import convert, toml_value
from kvframework.config.schema import L1Keys, L2Keys
from kvframework.errors import ConfigFieldError, PluginError, PluginWrongApi, PluginWrongKind
from kvframework.registry.discovery import KINDS
from kvframework.registry.plugin_check import AnyProvider, adopt, check_requires, hooks_of, offered, probed
from kvframework.registry.tables import describe_options

_HOOKS = [kind.hook for kind in KINDS.values()]
_MARK = f"{PROJECT}_impl"


def main() -> None:
    target = msgspec.json.decode(sys.stdin.buffer.read(), type=Target)
    descriptor, pid, step = int(sys.argv[1]), os.getpid(), ""
    for line in _inspect(target):
        if os.getpid() != pid:  # else two processes would report
            os.write(2, f"{step}{FORKED}\n".encode())
            os._exit(1)
        step = line.step or step
        os.write(descriptor, msgspec.json.encode(line) + b"\n")


def _inspect(target: Target) -> Iterator[Line]:
    yield Line(step="import", dies="import-dies", where=target.module)
    try:
        plugin, cost = measured(metadata.EntryPoint("inspected", target.value, ENTRY_POINT_GROUP).load)
    except Exception as error:  # noqa: BLE001  whatever a plugin raises
        cause = " ".join(f"{type(error).__name__}: {error}".split())
        yield Line(problem=problem("import-fails", target.module, f"the import fails with {cause}"))
        return
    yield Line(cost=cost)
    found = list(hook_problems(plugin, target.value))
    yield from _lines(found)
    if any(each.severity == "error" for each in found):
        yield Line(note=f"{target.value}: its hooks were not called, because they must be fixed first")
        return
    yield Line(step="hooks", dies="hook-fails", where=target.value)
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
    titles = {offer.title for offer in target.offers}
    for offer in target.offers:
        if offer.title not in providers and offer.kind in KINDS and target.chosen in ("", offer.title):
            fact = f"no provider of {target.value} has that kind and name"
            yield problem("entry-point-name", offer.title, fact, ", ".join(providers))
    for title in providers if titles and not target.chosen else ():
        if title not in titles:
            yield problem("no-entry-point", title, "no entry point names the plugin", f'"{title}" = "{target.value}"')


def _provider(provider: AnyProvider, title: str, options: Mapping[str, object]) -> Iterator[Line]:
    try:
        check_requires(provider.requires_api, title)
    except PluginError as error:
        yield Line(problem=_of_loader(error, title))
    if not isinstance(provider.summary, str) or not provider.summary.strip():
        yield Line(problem=problem("no-summary", title, "the plugin's summary is empty", "a line of text"))
    yield Line(step=f"the probe of {title}", dies="probe-fails", where=title)
    try:
        probed(provider, title)
    except PluginError as error:
        yield Line(problem=problem("probe-fails", title, error.fact, "None, or why it cannot run here"))
    yield from _lines(_option_problems(provider, title))
    wrong = list(signature_problems(provider, title))
    yield from _lines(wrong)
    if not wrong:
        yield Line(step=f"create of {title}", dies="create-dies", where=title)
        for found in created(provider, title, options):
            yield Line(problem=found) if isinstance(found, Problem) else Line(note=found)


def _of_loader(error: PluginError, where: str) -> Problem:
    if isinstance(error, PluginWrongApi):
        return problem("api-version", where, error.fact, error.available)
    name = "wrong-kind" if isinstance(error, PluginWrongKind) else "hook-fails"
    return problem(name, where, error.fact, error.available, error.hint)


def _lines(problems: Iterable[Problem]) -> Iterator[Line]:
    return (Line(problem=each) for each in problems)


def hook_problems(plugin: object, where: str) -> Iterator[Problem]:
    """Problems of everything in `plugin`, a module or an object, that is a hook implementation or looks like one."""
    marked = 0
    for name, function in _functions(plugin):
        options = getattr(function, _MARK, None)
        place = f"{where}.{name}"
        hook = name if options is None else options.get("specname") or name
        meant = next(iter(difflib.get_close_matches(hook, _HOOKS, n=1, cutoff=0.7)), "")
        if options is None:
            is_of_plugin = not inspect.ismodule(plugin) or getattr(function, "__module__", None) == plugin.__name__
            if meant and is_of_plugin and name.startswith("kvf_"):
                yield problem("unmarked-hook", place, "it is not marked", f"@hookimpl before def {meant}()")
            continue
        marked += 1
        if hook not in _HOOKS:
            hint = f"did you mean {meant}?" if meant else ""
            yield problem("misspelt-hook", place, f"there is no hook {hook}", ", ".join(_HOOKS), hint)
        if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
            yield problem("async-hook", place, "it is a coroutine function or a generator", "def that returns a list")
        if parameters := inspect.signature(function).parameters:
            yield problem("hook-arguments", place, f"it takes {', '.join(parameters)}", "no parameter")
    if not marked:
        yield problem("no-hook", where, "nothing in it is marked with @hookimpl", " or ".join(_HOOKS))


def _functions(plugin: object) -> Iterator[tuple[str, Callable[..., Any]]]:
    for name in dir(plugin):
        try:
            value = getattr(plugin, name)
        except Exception:  # noqa: BLE001, S112  a property of the plugin's; pluggy passes over it as well
            continue
        if inspect.isroutine(value):
            yield name, value


def core_keys(provider: AnyProvider) -> tuple[str, ...]:
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
            described = f"{field.name}: Annotated[..., msgspec.Meta(description=...)]"
            yield problem("undocumented-option", place, "the option has no description", described)
        if option.name in reserved:
            fact = f"{option.name} is a key of the core: the plugin never sees it"
            yield problem("reserved-option", place, fact, f"a name that is none of {', '.join(reserved)}")
        if _unreadable(field.type):
            fact = f"no TOML value can be read as {option.type}"
            yield problem("unreadable-option", place, fact, "a type that msgspec reads by itself, or ByteSize")
        elif not option.required and (reason := _wrong_default(provider.options, option.name, option.default)):
            yield problem("wrong-default", place, reason, "a value that TOML can express, within the option's bounds")


def _unreadable(kind: types.Type) -> bool:
    if isinstance(kind, types.Metadata):
        return _unreadable(kind.type)
    if isinstance(kind, types.UnionType):
        return any(map(_unreadable, kind.types))
    return isinstance(kind, types.CustomType) and kind.cls is not ByteSize


def _wrong_default(options: type[Options], name: str, default: object) -> str:
    """The reason why the default is no possible TOML value, or ""."""
    field = next(each for each in msgspec.structs.fields(options) if each.encode_name == name)
    one = msgspec.defstruct("One", [(field.name, field.type)], bases=(Options,), frozen=True, rename={field.name: name})
    try:
        plain = msgspec.to_builtins(default, enc_hook=int)
        if default is not None:
            toml_value(plain)
        read = getattr(convert({name: plain}, one, where=name), field.name)
    except NotImplementedError:
        return ""  # its type has no conversion from plain values, so the default cannot be checked here
    except (ConfigFieldError, TypeError, ValueError) as error:
        return f"the option's default {default!r} is refused: {error}"
    return "" if read == default else f"its default {default!r} comes back as {read!r}"
