"""What an engine's integration needs besides the adapters: its options, the engine's calls that it watches, the trace,
calls that cannot harm the engine, and a registration that waits for a server."""

from __future__ import annotations

import difflib
import functools
import logging
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Annotated, Any, Generic, Protocol, TypeVar, cast

import msgspec

from kvframework.api.keys import sampled_parent
from kvframework.api.plugin import Options
from kvframework.client.kv_client import KVClient
from kvframework.errors import ConfigFieldError, KVFrameworkError, ServerGone

log = logging.getLogger(__name__)

PREFIX = "kvframework."
# Pause before a registration that was refused is tried again; and how long one try waits for a server.
RETRY_S, _UP_S = 5.0, 0.5

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

Seconds = Annotated[float, msgspec.Meta(gt=0, le=3600)]


def _described(description: str) -> msgspec.Meta:
    return msgspec.Meta(description=description)


class EngineOptions(Options, frozen=True):
    """Base of an integration's options, with those of every engine; each field is a key `kvframework.<field>`."""

    endpoint: Annotated[
        str, _described('endpoint of the server; "": $KVFRAMEWORK_ENDPOINT, else the private endpoint of this user')
    ] = ""
    deadline_scale: Annotated[
        Annotated[float, msgspec.Meta(ge=0.1, le=100)] | None,
        _described(
            "factor for the deadlines of calls to the server, 0.1 to 100; null: $KVFRAMEWORK_DEADLINE_SCALE, else 1"
        ),
    ] = None
    transport: Annotated[str, _described('name of the transport; "auto": the first that engine and server have')] = (
        "auto"
    )
    transport_options: Annotated[dict[str, object], _described("options of the transport")] = {}  # noqa: RUF012 - msgspec copies it
    model: Annotated[str, _described("model name in the key of cached KV; default: the engine's model name")] = ""
    weights: Annotated[
        str, _described("name of the weights in the key of cached KV; default: a digest of the local weight files")
    ] = ""


O = TypeVar("O", bound=EngineOptions)  # noqa: E741


def engine_options(extra: Mapping[str, object], kind: type[O], *, where: str, page: str) -> O:
    """The options of type `kind` among an engine's extra configuration, which the user knows as `where` and finds
    described on `page`. Other keys are passed over. Raises `ConfigFieldError` for unknown keys and wrong types."""
    mine = {key.removeprefix(PREFIX): value for key, value in extra.items() if key.startswith(PREFIX)}
    known = kind.__struct_fields__
    for name in mine:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            fact = f"unknown option {PREFIX}{name}"
            hint = f"did you mean {PREFIX}{near[0]}?" if near else "leave it out"
            raise ConfigFieldError(fact, where=where, available=", ".join(PREFIX + each for each in known), hint=hint)
    try:
        return msgspec.convert(mine, kind)
    except msgspec.ValidationError as error:
        # msgspec ends with "- at `$.field`".
        text, _, place = str(error).partition(" - at `$.")
        name = place.rstrip("`")
        raise ConfigFieldError(text, where=f"{where}, {PREFIX}{name}" if name else where, hint=f"see {page}") from None


# Calls of an engine's own methods that an integration has to know of, because the engine tells it nothing.


@dataclass
class WatchedCall:
    """One call of a method; `args` begin with its object. `result` is None until the method has returned."""

    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    result: Any = None

    def argument(self, place: int, name: str, default: Any = None) -> Any:
        """The argument at `place`, where the method's object is at 0, or by name."""
        return self.args[place] if len(self.args) > place else self.kwargs.get(name, default)


class CallWatcher(Protocol):
    def around(self, call: WatchedCall) -> AbstractContextManager[object]:
        """The call runs within the context. An exception of the context reaches the engine."""


def watch_calls(owner: type, names: Iterable[str], watcher: CallWatcher) -> None:
    """Run every call of these methods of a class within `watcher.around`, from now on and for each object of it. The
    watcher is borrowed: it watches no more once its owner has dropped it. Idempotent. Raises `AttributeError` for a
    method that the class lacks, before it changes any."""
    for name, method in [(name, getattr(owner, name)) for name in names]:
        if not hasattr(method, "watchers"):
            method = _watched(name, method)
            setattr(owner, name, method)
        method.watchers.add(watcher)


def _watched(name: str, method: Callable[..., Any]) -> Any:
    watchers: weakref.WeakSet[Any] = weakref.WeakSet()

    @functools.wraps(method)
    def watched(*args: Any, **kwargs: Any) -> Any:
        call = WatchedCall(name, args, kwargs)
        with ExitStack() as contexts:
            for watcher in list(watchers):
                contexts.enter_context(watcher.around(call))
            call.result = method(*args, **kwargs)
        return call.result

    watched.watchers = watchers  # type: ignore[attr-defined]
    return watched


def current_trace() -> str:
    """The traceparent of the current span, for `RequestHashes`; "" if it is not sampled, or nothing here has imported
    OpenTelemetry. Never raises."""
    opentelemetry = sys.modules.get("opentelemetry.trace")
    if opentelemetry is None:
        return ""
    try:
        context = opentelemetry.get_current_span().get_span_context()
        return sampled_parent(f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}")
    except Exception:  # noqa: BLE001  a tracer of another kind, or one that is being imported
        return ""


# Calls of an integration whose exceptions do not reach the engine.


class ErrorNotes(Counter[str]):
    """Errors of `harmless` methods, counted as "method: kind"; the first of each is logged. `counted` hears of all."""

    def __init__(self, counted: Callable[[], object] = lambda: None) -> None:
        super().__init__()
        self._counted = counted

    def note(self, where: str, error: Exception) -> None:
        """Count a failed call; log the first of its kind."""
        kind = f"{where}: {type(error).__name__}"
        self[kind] += 1
        self._counted()
        if self[kind] == 1:
            known = isinstance(error, KVFrameworkError)
            text = "%s failed, and the engine continues without the cache: %s"
            log.error(text, where.lstrip("_"), error if known else repr(error), exc_info=None if known else error)


class Noting(Protocol):
    """An object with `harmless` methods."""

    errors: ErrorNotes


def harmless(
    default: Callable[[], object] = lambda: None, then: Callable[..., object] | None = None
) -> Callable[[F], F]:
    """Decorate a method so that it returns `default()` instead of raising, and its object's `errors` counts the error.
    After an error `then` is called with the method's arguments; its result replaces the default unless it is None or
    `then` raises."""

    def decorate(method: F) -> F:
        @functools.wraps(method)
        def guarded(self: Noting, *args: object, **kwargs: object) -> object:
            answer = None
            try:
                return method(self, *args, **kwargs)
            except Exception as error:  # noqa: BLE001 - whatever it is, it is the cache's
                self.errors.note(method.__name__, error)
            if then is not None:
                try:
                    answer = then(self, *args, **kwargs)
                except Exception as error:  # noqa: BLE001
                    self.errors.note(method.__name__, error)
            return default() if answer is None else answer

        return cast("F", guarded)

    return decorate


class Attachment(Generic[T]):
    """A registration with a server that may start later, refuse, or fail: until the registration succeeds the engine
    runs without the cache. For the engine's thread; `value` may be read in any thread.

    `register` is called once `client` is connected, by one thread at a time, and its result is `value`. Its errors are
    logged, once per reason, after the text `missing`; then it is called again: as soon as a server is connected, or
    after `RETRY_S` if one already is."""

    def __init__(self, client: KVClient, register: Callable[[], T], *, missing: str) -> None:
        self.value: T | None = None
        self._client, self._register, self._missing = client, register, missing
        self._logged: set[str] = set()
        self._registering = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def stopped(self) -> bool:
        """Whether `stop` was called. Never blocks."""
        return self._stop.is_set()

    def begin(self, wait_s: float) -> None:
        """Register in this thread, which waits for a server for `wait_s` seconds; in the background if that fails."""
        stop = self._stop = threading.Event()
        if self._tried(stop, wait_s) is not None:
            self.begin_in_background()

    def begin_in_background(self, prepare: Callable[[threading.Event], None] = lambda _stop: None) -> None:
        """Register in another thread, which stops its earlier attempts. Each attempt first calls `prepare`, which may
        take long: `stop` sets its argument, and does not wait for it. At least one attempt runs. Never blocks."""
        self._stop.set()
        before, stop = self._thread, threading.Event()

        def run() -> None:
            if before is not None:
                before.join()
            while (error := self._tried(stop, _UP_S, prepare)) is not None and not stop.is_set():
                if not isinstance(error, ServerGone):
                    stop.wait(RETRY_S)

        self._stop = stop
        self._thread = threading.Thread(target=run, name="kvf-attach", daemon=True)
        self._thread.start()

    def replace(self, stop: threading.Event, change: Callable[[], None]) -> None:
        """For `prepare`: makes `change` end what is registered, and registers again. Not after `stop`."""
        with self._registering:
            if not stop.is_set():
                self.value = None
                change()

    def stop(self, wait_s: float) -> T | None:
        """End the attempts, and return the registered `value`, which the caller ends. Waits for a call of `register` or
        `replace` for `wait_s` seconds at most. Idempotent."""
        self._stop.set()
        if self._registering.acquire(timeout=wait_s):
            self._registering.release()
        value, self.value = self.value, None
        return value

    def _tried(
        self, stop: threading.Event, wait_s: float, prepare: Callable[[threading.Event], None] = lambda _stop: None
    ) -> Exception | None:
        """Try once; return the error of a failure."""
        try:
            prepare(stop)
            if self.value is not None:
                return None
            if not self._client.wait_up(wait_s):
                self._client.raise_down()
            with self._registering:
                if not stop.is_set():
                    self.value = self._register()
        except Exception as error:
            if str(error) not in self._logged and not (self._logged and isinstance(error, ServerGone)):
                self._logged.add(str(error))
                known = isinstance(error, KVFrameworkError)
                log.warning("%s: %s", self._missing, error, exc_info=None if known else error)
            return error
        return None
