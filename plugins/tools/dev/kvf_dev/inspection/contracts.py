"""The contract of each kind, and the check of a class or an object against it: methods, signatures, attributes. Calls
nothing of it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from kvf_dev.inspection.problems import Problem, problem
from kvframework.api.codec import Codec
from kvframework.api.driver import CopierDriver, EngineDriver
from kvframework.api.eviction import EvictionPolicy
from kvframework.api.hasher import KeyHasher
from kvframework.api.layout import Layout
from kvframework.api.listener import Listener
from kvframework.api.memory import Memory
from kvframework.api.tier import Tier
from kvframework.api.transport import ServerTransport, TransferContext
from kvframework.registry.check import declared_attributes
from kvframework.registry.loader import AnyProvider


class Maker(NamedTuple):
    """One function of a provider that makes an object, the number of arguments that the core passes, and the contract
    of the result."""

    name: str
    arguments: int
    contract: type[Any] | None


_MAKERS: dict[str, tuple[Maker, ...]] = {
    "DeviceTransportProvider": (
        Maker("create_engine", 1, EngineDriver),
        Maker("create_copier", 3, CopierDriver),
        Maker("diagnose", 3, None),
    ),
    "TransportProvider": (Maker("create", 2, TransferContext), Maker("create_server", 2, ServerTransport)),
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
    """The functions of a provider that the core calls, by its nearest class that is known here."""
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
            yield problem(
                "async-method", f"{title}: {maker.name}", "it is a coroutine function", expected="def", hint="write def"
            )


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
            yield problem("async-method", place, "it is asynchronous", expected=f"def {name}", hint="write def")
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
                hint="set it in the class or in __init__",
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
