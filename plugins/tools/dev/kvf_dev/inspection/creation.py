"""The objects of a plugin under inspection: whether its functions can be called as the core does it, and whether what
`create` makes has all that its contract asks for. Runs in the inspecting process."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from kvf_dev.inspection.problems import Problem, problem
from kvframework.api.hasher import KeyHasher
from kvframework.api.listener import ListenerContext, ServerTerms
from kvframework.api.memory import MemoryContext
from kvframework.api.requests import CacheServices, Handler
from kvframework.api.tier import TableContext
from kvframework.errors import KVFrameworkError, NotRegistered
from kvframework.registry.plugin_check import AnyProvider
from kvframework.registry.registry import PluginRegistry
from kvframework.registry.tables import declared_attributes

WHERE = "plugins check"


def signature_problems(provider: AnyProvider, title: str) -> Iterator[Problem]:
    """Problems of the functions of a provider that the core calls: each has as many parameters as its field says."""
    hints = typing.get_type_hints(type(provider))
    for field in dataclasses.fields(provider):
        function = getattr(provider, field.name)
        parameters = _parameters(hints[field.name]) if field.init else None
        if function is None or parameters is None:
            continue
        place = f"{title}: {field.name}"
        if not callable(function) or not _takes(function, len(parameters)):
            expected = f"a function of {len(parameters)}, see {type(provider).__name__}"
            yield problem("wrong-signature", place, f"the method does not take {len(parameters)} arguments", expected)
        if inspect.iscoroutinefunction(function):
            yield problem("async-method", place, "it is asynchronous", "def")


def _parameters(hint: Any) -> list[Any] | None:
    """Return the types of the parameters of a field that holds a function, None for any other field."""
    for each in (hint, *typing.get_args(hint)):
        if typing.get_origin(each) is Callable:
            return list(typing.get_args(each)[0])
    return None


def created(provider: AnyProvider, title: str, given: Mapping[str, object]) -> Iterator[Problem | str]:
    """Yield the problems of what `create` makes with the options `given`, defaults for the others; a note if nothing
    can be made here. What was made stays open until the process ends."""
    hint = typing.get_type_hints(type(provider))["create"]
    contract = typing.get_args(hint)[1]
    fields = msgspec.structs.fields(provider.options)
    needed = [each.encode_name for each in fields if each.required and each.encode_name not in given]
    reason = "creating the object needs an engine" if provider.kind == "transport" else provider.probe()
    if needed and not reason:
        lacks = f"option {needed[0]} has" if len(needed) == 1 else f"options {', '.join(needed)} have"
        reason = f"its {lacks} no default, give {' '.join(f'--set {name}=VALUE' for name in needed)}"
    if reason:
        yield f"{title}: no plugin object was created here: {reason}; the conformance kit checks the rest"
        return
    step = "check"
    try:
        options = PluginRegistry(()).options(provider, given, where="--set")
        if provider.check is not None:
            provider.check(options, TableContext(where=WHERE))
        step = "create"
        made = typing.cast("Any", provider).create(options, *_context(provider.kind))
    except KVFrameworkError as error:
        fact = f"{error.where}: {error.fact}" if error.where else error.fact
        if given:
            yield problem("options-refused", title, f"{fact} [{error.code}]", error.available, error.hint)
        else:
            yield f"{title}: no plugin object was created here: {fact}; the conformance kit checks the rest"
    except Exception as error:  # noqa: BLE001  whatever a plugin raises
        cause = " ".join(f"{type(error).__name__}: {error}".split())
        lacks_methods = isinstance(error, TypeError) and "instantiate abstract class" in cause
        options_text = f"the options {', '.join(given)}" if given else "default options"
        fact = f"{step} raised {cause}, with {options_text}"
        expected = _named(contract) if step == "create" else "None"
        yield problem("missing-method" if lacks_methods else "create-fails", title, fact, expected)
    else:
        if provider.kind == "requests":
            yield from _handler_problems(provider, made, title)
        else:
            yield from _object_problems(made, contract, title)


def _context(kind: str) -> list[object]:
    if kind == "tier":
        return [TableContext(where=WHERE)]
    if kind == "memory":
        return [MemoryContext(where=WHERE)]
    if kind == "listener":
        return [_unused(ListenerContext, where=WHERE, server=ServerTerms(), hasher=_no_hasher())]
    return [no_services()] if kind == "requests" else []


def _named(contract: Any) -> str:
    return f"a {getattr(contract, '__name__', 'list of Handler')}"


def _object_problems(made: object, contract: type[Any], title: str) -> Iterator[Problem]:
    name_of_class = f"{title}: {type(made).__name__}"
    if not isinstance(made, contract):
        yield problem("create-fails", title, f"create returned {type(made).__name__}", _named(contract))
        return
    for name in declared_attributes(contract):
        if not hasattr(made, name):
            fact = f"the object has no attribute {name}"
            yield problem("missing-attribute", name_of_class, fact, f"{name}, see {contract.__name__}")
    for name, required in inspect.getmembers(contract, inspect.isfunction):
        own = inspect.getattr_static(type(made), name, None)
        if name.startswith("_") or own is required or not inspect.isfunction(own):
            continue
        if inspect.iscoroutinefunction(own) or inspect.isasyncgenfunction(own):
            yield problem("async-method", f"{name_of_class}.{name}", "it is asynchronous", "def")
        elif not _serves(own, required):
            fact = f"the method takes {inspect.signature(own)}"
            yield problem("wrong-signature", f"{name_of_class}.{name}", fact, f"{name}{inspect.signature(required)}")


def _handler_problems(provider: AnyProvider, made: object, title: str) -> Iterator[Problem]:
    if not isinstance(made, (list, tuple)) or not all(isinstance(each, Handler) for each in made):
        yield problem("create-fails", title, f"create returned {type(made).__name__}", "a list of Handler")
        return
    for handler in made:
        name = handler.spec.name
        if not name.startswith(f"{provider.name}."):
            fact = f"the request {name!r} is outside its namespace"
            yield problem("create-fails", title, fact, f"{provider.name}.NAME", "rename the request")
        if inspect.iscoroutinefunction(handler.call):
            yield problem("async-method", f"{title}: {name}", "it is asynchronous", "def")


def _serves(own: Callable[..., Any], required: Callable[..., Any]) -> bool:
    """True if `own` accepts every call that `required` accepts: in order, and by keyword. The core leaves out arguments
    with defaults, and names them or not."""
    parameters = list(inspect.signature(required).parameters.values())
    needed = [each for each in parameters if each.default is each.empty]
    for chosen in (parameters, needed):
        plain = [each for each in chosen if each.kind is each.POSITIONAL_OR_KEYWORD]
        only = {each.name for each in chosen if each.kind is each.KEYWORD_ONLY}
        named = {each.name for each in plain if each.default is not each.empty}
        if not (_takes(own, len(plain), only) and _takes(own, len(plain) - len(named), only | named)):
            return False
    return True


def _takes(function: Callable[..., Any], positional: int, by_name: set[str] = frozenset()) -> bool:  # type: ignore[assignment]
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return True  # written in C: its signature is unknown
    try:
        signature.bind(*[None] * positional, **dict.fromkeys(by_name))
    except TypeError:
        return False
    return True


def no_services() -> CacheServices:
    services: CacheServices = _unused(CacheServices, chunk_size=256, hasher=_no_hasher())
    return services


def _no_hasher() -> KeyHasher:
    hasher: KeyHasher = _unused(KeyHasher, name="none", fingerprint="none")
    return hasher


def _unused(contract: type[Any], **attributes: object) -> Any:
    """Return an object of an abstract class that has these attributes, and whose methods all refuse."""

    def refuse(*_arguments: object, **_named: object) -> None:
        raise NotRegistered("a plugin under inspection has no server")

    methods = dict.fromkeys(contract.__abstractmethods__, refuse)
    return type(contract.__name__, (contract,), {**methods, **attributes})()
