"""The inspecting process: imports one plugin, calls its hooks, makes its objects, and reports each step before it takes
it. Ends by itself; `inspector` starts it and reads the report."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from importlib import metadata
from typing import Any

import msgspec
import pluggy

from kvf_dev.inspection.declared import declared_problems, hook_problems
from kvf_dev.inspection.making import (
    NotMade,
    attribute_problems,
    class_in_source,
    class_problems,
    declared_class,
    make,
    maker_problems,
    makers,
)
from kvf_dev.inspection.problems import Line, Problem, problem
from kvf_dev.inspection.targets import SourceFile, Target, read_sources
from kvframework.api import hookspecs
from kvframework.api.plugin import ENTRY_POINT_GROUP, PROJECT
from kvframework.config import closest
from kvframework.errors import PluginError, PluginWrongApi, PluginWrongKind
from kvframework.registry import KINDS, AnyProvider
from kvframework.registry.discovery import check_requires
from kvframework.registry.registry import adopt, hooks_of, offered


def main() -> None:
    """Reads a `Target` from standard input; `argv[1]` is the report's descriptor."""
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
    sources = read_sources(target.module)
    for title, provider in providers.items():
        if target.chosen in ("", title):
            yield Line(provider=title)
            yield from _provider(provider, title, sources, target.options)


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


def _provider(
    provider: AnyProvider, title: str, sources: list[SourceFile], options: Mapping[str, object]
) -> Iterator[Line]:
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
                yield from _not_made(title, str(reason), known := made_class or _sought(sources, maker.contract))
                made_class = known
            else:
                yield from _lines(problems)
                if made is not None and maker.contract is not None:
                    made_class = type(made)
                    yield from _lines(attribute_problems(made, maker.contract, title))
        if made_class is not None and maker.contract is not None:
            yield from _lines(class_problems(made_class, maker.contract, title))


def _sought(sources: list[SourceFile], contract: type[Any] | None) -> type[Any] | None:
    return class_in_source(sources, contract) if contract is not None else None


def _not_made(title: str, reason: str, known: type[Any] | None) -> Iterator[Line]:
    instead = f"its class {known.__name__} was checked instead" if known else "the conformance kit checks the rest"
    yield Line(note=f"{title}: none was created here: {reason}; {instead}")


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
