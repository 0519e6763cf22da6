"""The contract of each kind, and the class of the objects that a provider makes: from `create` itself, by making one,
or from the source. Runs in the inspecting process."""

from __future__ import annotations

import importlib
import inspect
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from kvf_dev.inspection.problems import Problem, problem
from kvf_dev.inspection.targets import SourceFile, classes_of
from kvframework.api.codec import Codec
from kvframework.api.driver import CopierDriver, EngineDriver
from kvframework.api.eviction import EvictionPolicy
from kvframework.api.hasher import KeyHasher
from kvframework.api.layout import Layout, MemoryLayoutDesc
from kvframework.api.listener import ChunkShape, Listener, ListenerContext, ListenerProvider, ServerTerms, Sockets
from kvframework.api.memory import Memory, MemoryContext, MemoryProvider, TableContext
from kvframework.api.requests import (
    Buffer,
    CacheKey,
    CacheServices,
    ClientInfo,
    Handler,
    InstanceContext,
    PackedKey,
    PrefetchTask,
    RequestsProvider,
    Select,
)
from kvframework.api.tier import Tier, TierProvider
from kvframework.api.transport import AnyTransportProvider, ServerTransport, TransferContext
from kvframework.config import convert
from kvframework.errors import ConfigFieldError, KVFrameworkError, NotRegistered
from kvframework.registry import AnyProvider
from kvframework.registry.check import declared_attributes


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


WHERE = "plugins check"


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


def class_in_source(sources: list[SourceFile], contract: type[Any]) -> type[Any] | None:
    """The only class of the plugin's package that names the contract as a base. Imports its module."""
    found = list(classes_of(sources, contract.__name__))
    if len(found) != 1:
        return None
    module, name = found[0]
    try:
        made = getattr(importlib.import_module(module), name, None)
    except Exception:  # noqa: BLE001  it needs what is not installed here
        return None
    return made if isinstance(made, type) else None


def make(provider: AnyProvider, maker: Maker, title: str, given: Mapping[str, object]) -> tuple[object, list[Problem]]:
    """The result of `create` with the options `given`, defaults for the others; it stays open until the process ends.
    Raises `NotMade`, also if `create` refuses the defaults; its refusal of what was given is a problem."""
    if isinstance(provider, AnyTransportProvider):
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
        arguments.append(_NoServices())
    if isinstance(provider, ListenerProvider):
        arguments.append(_NoServer())
    try:
        made = typing.cast("Any", provider).create(*arguments)
    except KVFrameworkError as error:
        if given:
            return None, [_refused(title, error)]
        raise NotMade(f"{error.fact} [{error.code}]") from error
    except Exception as error:
        if isinstance(error, TypeError) and "abstract" in str(error):
            raise NotMade(str(error)) from error  # the class's own check names the methods
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
    return problem(
        "create-fails",
        title,
        fact,
        expected=f"a {maker.contract.__name__}" if maker.contract else "a list of Handler",
        hint="raise a KVFrameworkError for what is not available here, or report it in the probe",
    )


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
            yield problem(
                "async-method",
                f"{title}: {name}",
                "its handler is asynchronous",
                expected="def",
                hint="return a Future for what takes time",
            )


class _NoHasher(KeyHasher):
    name = fingerprint = "none"

    def chunk_digests(
        self, tokens: Buffer, chunk_tokens: int, *, parent: bytes = b"", extras: Mapping[int, bytes] | None = None
    ) -> bytes:
        return b""


class _NoServices(CacheServices):
    """Services for handlers that are made and never called."""

    chunk_size = 256
    hasher = _NoHasher()

    def instance(self, instance_id: int, client: ClientInfo | None = None) -> InstanceContext:
        raise NotRegistered("nothing is registered with a plugin under inspection")

    def key_prefixes(self, namespace: bytes, cache_salt: str, ranks: Sequence[int]) -> Sequence[bytes]:
        return [b""] * len(ranks)

    def resolve_keys(self, key: CacheKey) -> Mapping[tuple[int, int], Sequence[PackedKey]]:
        return {}

    def layout_desc(self, namespace: bytes) -> MemoryLayoutDesc | None:
        return None

    def present(self, keys: Sequence[PackedKey]) -> Sequence[bool]:
        return [False] * len(keys)

    def pin(self, client: ClientInfo, keys: Sequence[PackedKey], request_id: str = "") -> str:
        return ""

    def submit_prefetch_task(
        self, keys: Sequence[PackedKey], layout_desc: MemoryLayoutDesc, *, select: Select | None = None
    ) -> PrefetchTask | None:
        return None


class _NoServer(ListenerContext):
    """A server for a listener that is made and never started."""

    where = WHERE
    server = ServerTerms()
    hasher = _NoHasher()

    def present(self, keys: Sequence[PackedKey]) -> Sequence[bool]:
        return [False] * len(keys)

    def shape(self, namespace: bytes, cache_salt: str) -> ChunkShape | None:
        return None

    def sockets(self, *, insecure: bool = False) -> Sockets:
        raise NotRegistered("a listener under inspection has no sockets")
