"""The check of a plugin's hook implementations, by pluggy's rules. Runs in the inspecting process, which has imported
the plugin."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from kvf_dev.inspection.problems import Problem, problem
from kvframework.api.plugin import PROJECT
from kvframework.registry import KINDS

_HOOKS = [kind.hook for kind in KINDS.values()]
_MARK = f"{PROJECT}_impl"
_PREFIX = "kvf_"


def hook_problems(plugin: object, where: str) -> Iterator[Problem]:
    """Problems of everything in `plugin`, a module or an object, that is a hook implementation or looks like one."""
    marked = 0
    for name, function in _functions(plugin):
        options = getattr(function, _MARK, None)
        place = f"{where}.{name}"
        if options is None:
            if name.startswith(_PREFIX) and _defined_here(function, plugin) and (meant := _meant(name)):
                yield problem(
                    "unmarked-hook",
                    place,
                    "it looks like a hook but is not marked",
                    expected=f"@hookimpl before def {meant}()",
                    hint="mark it with @kvframework.api.plugin.hookimpl",
                )
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
        yield problem(
            "no-hook",
            where,
            "nothing in it is marked with @hookimpl",
            expected=" or ".join(_HOOKS),
            hint="mark the function that returns the providers with @kvframework.api.plugin.hookimpl",
        )


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
    if (
        inspect.iscoroutinefunction(function)
        or inspect.isasyncgenfunction(function)
        or inspect.isgeneratorfunction(function)
    ):
        yield problem(
            "async-hook",
            place,
            "it is a coroutine function or a generator",
            expected="def that returns a list",
            hint="hooks run once, at startup, in a process without an event loop",
        )
    parameters = list(inspect.signature(function).parameters.values())
    only = [each.name for each in parameters if each.kind is each.KEYWORD_ONLY]
    others = [str(each) for each in parameters if each.kind is not each.KEYWORD_ONLY]
    if only:
        yield problem(
            "keyword-only-hook",
            place,
            f"it takes {', '.join(only)} by keyword only",
            expected="no parameter",
            hint="hooks are called without arguments; options come to `create`",
        )
    if others:
        yield problem(
            "hook-arguments",
            place,
            f"it takes {', '.join(others)}",
            expected="no parameter",
            hint="hooks are called without arguments; options come to `create`",
        )
