"""What an engine's integration needs besides the adapters: its options, the engine's calls that it watches, and the
engine's trace."""

from __future__ import annotations

import difflib
import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Annotated, Any, Protocol, TypeVar

import msgspec

from kvframework.api.keys import sampled_parent
from kvframework.api.options import Options
from kvframework.errors import ConfigFieldError

PREFIX = "kvframework."

Seconds = Annotated[float, msgspec.Meta(gt=0, le=3600)]


class EngineOptions(Options, frozen=True):
    """Base of an integration's options, with those that every engine has. Each field is the key
    `kvframework.<field>`."""

    endpoint: Annotated[
        str,
        msgspec.Meta(description='the server; "": $KVFRAMEWORK_ENDPOINT, then the private endpoint of this user'),
    ] = ""
    deadline_scale: Annotated[
        Annotated[float, msgspec.Meta(ge=0.1, le=100)] | None,
        msgspec.Meta(
            description="makes the deadlines of calls to the server longer or shorter, 0.1 to 100; "
            "null: $KVFRAMEWORK_DEADLINE_SCALE, else 1"
        ),
    ] = None
    transport: Annotated[
        str, msgspec.Meta(description='a transport\'s name; "auto": the first that engine and server share')
    ] = "auto"
    transport_options: Annotated[dict[str, object], msgspec.Meta(description="options of the transport")] = {}  # noqa: RUF012 - msgspec copies it
    model: Annotated[
        str, msgspec.Meta(description="the model's name in the cache; default: its name in the engine")
    ] = ""
    weights: Annotated[
        str,
        msgspec.Meta(description="the weights' name; default: all bytes of the weight files, where they are local"),
    ] = ""


O = TypeVar("O", bound=EngineOptions)  # noqa: E741


def engine_options(extra: Mapping[str, object], kind: type[O], *, where: str, page: str) -> O:
    """The options of type `kind` among an engine's extra configuration, which the user knows as `where` and finds
    described on `page`. Keys without the prefix are passed over.

    Raises `ConfigFieldError` for an unknown key or a value of the wrong type.
    """
    mine = {key.removeprefix(PREFIX): value for key, value in extra.items() if key.startswith(PREFIX)}
    known = kind.__struct_fields__
    for name in mine:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            raise ConfigFieldError(
                f"there is no option {PREFIX}{name}",
                where=where,
                available=", ".join(PREFIX + each for each in known),
                hint=f"did you mean {PREFIX}{close[0]}?" if close else "leave it out",
            )
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
    """Runs every call of these methods of a class within `watcher.around`, from now on and for each object of it. The
    watcher is borrowed: it watches no more once its owner has dropped it. Idempotent. Raises `AttributeError` for a
    method that the class lacks, before it changes any."""
    methods = {name: getattr(owner, name) for name in names}
    for name, method in methods.items():
        watchers = getattr(method, "watchers", None)
        if watchers is None:
            watchers = weakref.WeakSet()
            setattr(owner, name, _watched(name, method, watchers))
        watchers.add(watcher)


def _watched(name: str, method: Callable[..., Any], watchers: weakref.WeakSet[Any]) -> Callable[..., Any]:
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
