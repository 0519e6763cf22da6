"""The tree of errors: one class, one stable code, one clear text.

Every error names the fact, where it was found, what is available and one hint. The `code` is part of the public
contract: it travels in error frames (`kvframework.wire.messages.ErrorPayload`), is printed by the CLI and never changes
its meaning. Errors also derive from the builtin that a caller would naturally catch.
"""

from __future__ import annotations

from typing import ClassVar


class KVFrameworkError(Exception):
    """The base class of all errors of kvframework.

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

    def __init_subclass__(cls, code: str = "") -> None:
        """`code` is the class's own, else it is that of its base."""
        if code:
            cls.code = code
            known = KVFrameworkError._by_code.setdefault(code, cls)
            if known is not cls and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
                raise TypeError(f"error code {code!r} is taken by {known.__qualname__}")

    def __str__(self) -> str:
        parts = [f"[{self.code}] {self.where + ': ' if self.where else ''}{self.fact}"]
        if self.available:
            parts.append(f"expected: {self.available}")
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


class RemoteError(KVFrameworkError, RuntimeError, code="remote"):
    """The other side answered with an error code that this release does not know.

    What to do: read the other side's text; install the same release on both sides."""


class ConfigError(KVFrameworkError, ValueError, code="config.invalid"):
    """The configuration is wrong: a file, a table, a field or a value.

    What to do: correct the place in the TOML that the error names, and run `kvframework config check FILE`."""


class ConfigFileError(ConfigError, code="config.file"):
    """The configuration file cannot be read or is no TOML.

    What to do: check the path and its permissions, or correct the line that the error names."""


class ConfigFieldError(ConfigError, code="config.field"):
    """A field of the configuration is unknown, missing, of the wrong type or nested too deep.

    What to do: correct the field that the error names; `kvframework plugins info KIND.NAME` lists the options."""


class EndpointError(ConfigError, code="config.endpoint"):
    """An endpoint is malformed, too long, not private or already taken by another server.

    What to do: choose a short path in a directory of the server's user that no other user may write to; stop the
    other server that the error names; give `tcp://` CURVE keys."""


class CurveKeyError(ConfigError, code="config.curve_key"):
    """A CURVE key file cannot be used or made.

    What to do: make keys with `kvframework keys new`, and keep the secret ones readable for their user only."""


class PluginError(KVFrameworkError, code="plugin.error"):
    """A plugin cannot be used.

    What to do: see the codes below."""


class PluginNotFound(PluginError, LookupError, code="plugin.not_found"):
    """No installed distribution offers a plugin of this kind and name.

    What to do: install the distribution, or correct the name; `kvframework plugins list` lists all plugins."""


class PluginConflict(PluginError, code="plugin.conflict"):
    """Two distributions offer the same kind and name.

    What to do: uninstall all but one of the distributions that the error names."""


class PluginBroken(PluginError, code="plugin.broken"):
    """A plugin failed: its import, its registration, its hook's result, or a call that did not return.

    What to do: report the error to the plugin's author, or choose another plugin; authors: run
    `kvframework plugins check`."""


class PluginWrongKind(PluginError, code="plugin.wrong_kind"):
    """A plugin exists under this name, but of another kind, or its hook returned another kind.

    What to do: name the plugin in a table of its kind; authors: return the descriptor of the hook's kind."""


class PluginWrongApi(PluginError, code="plugin.wrong_api"):
    """A plugin needs another version of the plugin API, or its distribution asks for another release of kvframework.

    What to do: install a release of the plugin for this kvframework, or another kvframework; see
    `docs/plugins/compatibility.md`."""


class PluginUnavailable(PluginError, code="plugin.unavailable"):
    """A plugin is installed but cannot run on this machine.

    What to do: install what the error names; the error's text has the command."""


class ProtocolError(KVFrameworkError, code="protocol.error"):
    """A message breaks the wire protocol.

    What to do: look for a client that is not part of kvframework; between equal releases, report a bug."""


class MalformedFrames(ProtocolError, ValueError, code="protocol.frames"):
    """The frames of a message have a wrong number, size or order.

    What to do: as for `protocol.error`; the server's log names the process."""


class UnknownRequest(ProtocolError, LookupError, code="protocol.unknown_request"):
    """The request type is not in the server's table.

    What to do: install the same release on both sides; for a plugin's request add its `[[requests]]` table to
    the server's TOML."""


class InvalidPayload(ProtocolError, ValueError, code="protocol.payload"):
    """The payload frame does not decode into the request's struct.

    What to do: install the same release on both sides; authors of a plugin: send the struct of the request."""


class MessageTooLarge(ProtocolError, ValueError, code="protocol.too_large"):
    """A message, frame or field is larger than the bound for it.

    What to do: keep to the bound that the error names: fewer chunks, shorter names, or a smaller `chunk_size`."""


class VersionMismatch(ProtocolError, code="protocol.version"):
    """Client and server share no protocol version, or differ in something that must be equal.

    What to do: install the same release on both sides, and give both the same hasher; then restart the engine."""


class HelloRequired(ProtocolError, code="protocol.hello_required"):
    """A request arrived before HELLO, or from a session that has ended.

    What to do: connect again: `KVClient` does so by itself."""


class RequestError(KVFrameworkError, ValueError, code="request.invalid"):
    """The server understood the request but cannot do what it asks for.

    What to do: correct the value that the error names; its text lists the values that are accepted."""


class NotRegistered(RequestError, LookupError, code="request.not_registered"):
    """This client has not registered an instance with this id.

    What to do: register the instance (again): `WorkerAdapter` does so by itself."""


class AlreadyRegistered(RequestError, code="request.already_registered"):
    """Another registration uses this instance id.

    What to do: give every worker process another instance id, or unregister the old instance first."""


class NamespaceMismatch(RequestError, code="request.namespace"):
    """The key names another namespace, model, world size or rank than the one registered.

    What to do: build scheduler and workers with one identity: model, revision, world size, layout, hasher, chunk
    size."""


class BadRange(RequestError, code="request.range"):
    """`start`, `end` and the content of a key do not fit each other or the chunk size.

    What to do: begin and end at whole chunks, and pass the content from the first token to `end`."""


class BadBlockIds(RequestError, code="request.block_ids"):
    """Block ids are out of range, or not as many as the key's tokens need.

    What to do: pass one list of block ids per layer group, with as many existing blocks as the tokens need."""


class BadLayout(RequestError, code="request.layout"):
    """A layout declaration is contradictory, ambiguous or too large.

    What to do: declare the axis, group or size that the error names. See `docs/plugins/layouts.md`."""


class BadDtype(BadLayout, code="request.dtype"):
    """The dtype's name does not exist.

    What to do: give torch's name without `torch.`."""


class LeaseUnknown(RequestError, LookupError, code="request.lease"):
    """The lease or ticket does not exist, has ended, or belongs to another client.

    What to do: look up again. Leases end after their time, with the client or with the server."""


class TransportMismatch(RequestError, code="request.transport"):
    """The request does not fit the transport that this instance was registered with.

    What to do: add the transport's `[[transport]]` table to the server's TOML, or choose one that both sides
    have."""


class DeadlineExceeded(KVFrameworkError, TimeoutError, code="run.deadline"):
    """A wait ended before the answer came.

    What to do: nothing: the engine computes. If the error repeats, see `kvframework status`."""


class ServerGone(KVFrameworkError, ConnectionError, code="run.server_gone"):
    """The server cannot be reached, has ended or has restarted.

    What to do: start the server, or see its log. The client reconnects by itself; until then all lookups miss."""


class Cancelled(KVFrameworkError, code="run.cancelled"):
    """The request was cancelled.

    What to do: nothing: the engine cancelled the request."""


class HandlerFailed(KVFrameworkError, RuntimeError, code="run.handler"):
    """A request handler raised an unexpected exception; the server's log holds the traceback.

    What to do: read the server's log, and report the traceback; for a plugin's request, to the plugin's author."""


class ShuttingDown(KVFrameworkError, ConnectionError, code="run.shutting_down"):
    """The server is stopping.

    What to do: nothing: the client connects to the next server by itself."""


class ServerFull(KVFrameworkError, ConnectionError, code="run.server_full"):
    """The server takes no further client: too many sessions are open, or too many of its descriptors are in use.

    What to do: nothing at first: the client retries by itself. If the error stays, end the process that holds the
    connections, or raise the server's limit (`LimitNOFILE`)."""


class OutOfResources(KVFrameworkError, OSError, code="run.resources"):
    """This process has too few descriptors or threads left for a connection to the server.

    What to do: raise the limit that the error names; the client then connects by itself. Until then lookups
    miss."""


class StorageError(KVFrameworkError, code="storage.error"):
    """The server could not store or read an object.

    What to do: raise `[l1] capacity` if the error says that L1 has no room; else see the server's log."""


class ArenaError(StorageError, MemoryError, code="storage.arena"):
    """The L1 arena cannot be created or mapped.

    What to do: lower `[l1] capacity`, or give the machine or container more memory."""


class TierError(StorageError, OSError, code="storage.tier"):
    """A call to an L2 tier failed.

    What to do: repair the store that the error names. Until the store works, its values are misses."""


class DeviceError(KVFrameworkError, RuntimeError, code="device.error"):
    """One operation on an accelerator failed; others may work.

    What to do: nothing: the transfer is a miss. If the error repeats, see the device's and the kernel's log."""


class DeviceLost(DeviceError, code="device.lost"):
    """The device's context is broken, its copier process ended, or the device is lost. A new process must open
    the device.

    What to do: nothing: the copier starts again, and instances register again. If it repeats, check the device."""
