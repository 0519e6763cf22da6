"""The class of the objects that a provider makes: from `create` itself, by making one, or from the source. Runs in the
inspecting process."""

from __future__ import annotations

import importlib
import inspect
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from kvf_dev.inspection.contracts import Maker
from kvf_dev.inspection.problems import Problem, problem
from kvf_dev.inspection.source import SourceFile, classes_of
from kvframework.api.hasher import KeyHasher
from kvframework.api.layout import MemoryLayoutDesc
from kvframework.api.listener import ChunkShape, ListenerContext, ListenerProvider, ServerTerms, Sockets
from kvframework.api.memory import MemoryContext, MemoryProvider, TableContext
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
from kvframework.api.tier import TierProvider
from kvframework.api.transport import AnyTransportProvider
from kvframework.config import convert
from kvframework.errors import ConfigFieldError, KVFrameworkError, NotRegistered
from kvframework.registry.loader import AnyProvider

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
