"""Owns the tree of errors: one class, one stable code, one clear text.

Every error names the fact, where it was found, what is available and one hint. The `code` is part of the
public contract: it travels in error frames (`kvframework.wire.messages.ErrorPayload`), is printed by the CLI and never
changes its meaning. Errors also derive from the builtin that a caller would naturally catch.
"""

from __future__ import annotations

from typing import ClassVar


class KVFrameworkError(Exception):
    """Base of all errors of the framework.

    `fact` says what is wrong, `where` names the place (file, TOML table, field, frame), `available` lists what
    would be accepted, `hint` is one thing to do about it.
    """

    code: ClassVar[str] = "error"
    _by_code: ClassVar[dict[str, type[KVFrameworkError]]] = {}

    def __init__(self, fact: str, *, where: str = "", available: str = "", hint: str = "") -> None:
        super().__init__(fact)
        self.fact = fact
        self.where = where
        self.available = available
        self.hint = hint

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        if "code" in cls.__dict__:
            known = KVFrameworkError._by_code.setdefault(cls.code, cls)
            if known is not cls and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
                raise TypeError(f"error code {cls.code!r} is taken by {known.__qualname__}")

    def __str__(self) -> str:
        parts = [f"[{self.code}] {self.where + ': ' if self.where else ''}{self.fact}"]
        if self.available:
            parts.append(f"available: {self.available}")
        if self.hint:
            parts.append(f"hint: {self.hint}")
        return "\n  ".join(parts)

    @staticmethod
    def from_code(code: str, fact: str, *, where: str = "", available: str = "", hint: str = "") -> KVFrameworkError:
        """The error that a peer named by `code`; an unknown code (of a newer peer) becomes `RemoteError`."""
        cls = KVFrameworkError._by_code.get(code)
        if cls is None:
            return RemoteError(f"{fact} ({code})", where=where, available=available, hint=hint)
        return cls(fact, where=where, available=available, hint=hint)


class RemoteError(KVFrameworkError, RuntimeError):
    """The peer answered with an error code that this version does not know."""

    code = "remote"


# configuration


class ConfigError(KVFrameworkError, ValueError):
    """The configuration is wrong: a file, a table, a field or a value."""

    code = "config.invalid"


class ConfigFileError(ConfigError):
    """The configuration file cannot be read or is no TOML."""

    code = "config.file"


class ConfigFieldError(ConfigError):
    """A field of the configuration is unknown, missing or of the wrong type."""

    code = "config.field"


class EndpointError(ConfigError):
    """An endpoint is malformed, too long, not private or already taken by another server."""

    code = "config.endpoint"


# plugins


class PluginError(KVFrameworkError):
    """A plugin cannot be used."""

    code = "plugin.error"


class PluginNotFound(PluginError, LookupError):
    """No installed distribution offers a plugin of this kind and name."""

    code = "plugin.not_found"


class PluginConflict(PluginError):
    """Two distributions offer the same kind and name."""

    code = "plugin.conflict"


class PluginBroken(PluginError):
    """Importing a plugin, registering it, or what its hook returned went wrong."""

    code = "plugin.broken"


class PluginWrongKind(PluginError):
    """A plugin exists under this name, but of another kind, or its hook returned another kind."""

    code = "plugin.wrong_kind"


class PluginWrongApi(PluginError):
    """A plugin needs another version of the plugin API."""

    code = "plugin.wrong_api"


class PluginUnavailable(PluginError):
    """A plugin is installed, but its probe says why it cannot run here."""

    code = "plugin.unavailable"


# the wire


class ProtocolError(KVFrameworkError):
    """A message breaks the wire protocol."""

    code = "protocol.error"


class MalformedFrames(ProtocolError, ValueError):
    """The frames of a message have a wrong number, size or order."""

    code = "protocol.frames"


class UnknownRequest(ProtocolError, LookupError):
    """The request type is not in the server's table."""

    code = "protocol.unknown_request"


class InvalidPayload(ProtocolError, ValueError):
    """The payload frame does not decode into the request's struct."""

    code = "protocol.payload"


class MessageTooLarge(ProtocolError, ValueError):
    """A message, frame or field is larger than the bound for it."""

    code = "protocol.too_large"


class VersionMismatch(ProtocolError):
    """Client and server share no protocol version, or differ in something that must be equal."""

    code = "protocol.version"


class HelloRequired(ProtocolError):
    """A request came before HELLO, or from a session that has ended."""

    code = "protocol.hello_required"


# requests


class RequestError(KVFrameworkError, ValueError):
    """A well-formed request asks for something that cannot be."""

    code = "request.invalid"


class NotRegistered(RequestError, LookupError):
    """No context is registered under this instance id by this client."""

    code = "request.not_registered"


class AlreadyRegistered(RequestError):
    """A context is registered under this instance id already."""

    code = "request.already_registered"


class NamespaceMismatch(RequestError):
    """The key names another namespace, model, world size or rank than the one registered."""

    code = "request.namespace"


class BadRange(RequestError):
    """`start`, `end` and the content of a key do not fit each other or the chunk size."""

    code = "request.range"


class BadBlockIds(RequestError):
    """Block ids are out of range, or not as many as the key's tokens need."""

    code = "request.block_ids"


class BadLayout(RequestError):
    """A layout declaration is contradictory, ambiguous or too large."""

    code = "request.layout"


class BadDtype(BadLayout):
    """A dtype name that does not exist."""

    code = "request.dtype"


class LeaseUnknown(RequestError, LookupError):
    """The lease or ticket does not exist, has ended, or belongs to another client."""

    code = "request.lease"


class TransportMismatch(RequestError):
    """The request does not fit the transport that this instance was registered with."""

    code = "request.transport"


# running


class DeadlineExceeded(KVFrameworkError, TimeoutError):
    """A wait ended before the answer came."""

    code = "run.deadline"


class ServerGone(KVFrameworkError, ConnectionError):
    """The server cannot be reached, went away or was replaced by another boot."""

    code = "run.server_gone"


class Cancelled(KVFrameworkError):
    """The request was cancelled."""

    code = "run.cancelled"


class HandlerFailed(KVFrameworkError, RuntimeError):
    """A request handler raised something unforeseen; the server's log holds the traceback."""

    code = "run.handler"


class ShuttingDown(KVFrameworkError, ConnectionError):
    """The server is stopping."""

    code = "run.shutting_down"


# storage


class StorageError(KVFrameworkError):
    """Storage failed."""

    code = "storage.error"


class ArenaError(StorageError, MemoryError):
    """The L1 arena cannot be created or mapped."""

    code = "storage.arena"


class TierError(StorageError, OSError):
    """A whole operation of an L2 tier failed. Distinct from a key that is missing."""

    code = "storage.tier"


# devices


class DeviceError(KVFrameworkError, RuntimeError):
    """One operation on an accelerator failed; others may work."""

    code = "device.error"


class DeviceLost(DeviceError):
    """An accelerator's context is poisoned, its copier process ended or the device is gone: nothing works until a new
    process opens it."""

    code = "device.lost"
