"""The tree of errors: one class, one stable code, one clear text.

Every error names the fact, where it was found, what is available and one hint. The `code` is part of the public
contract: it travels in error frames (`kvframework.wire.messages.ErrorPayload`), is printed by the CLI and never changes
its meaning. Errors also derive from the builtin that a caller would naturally catch.
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
    """The peer answered with an error code that this version does not know.

    What to do: the text is the peer's; install the same release on both sides."""


class ConfigError(KVFrameworkError, ValueError, code="config.invalid"):
    """The configuration is wrong: a file, a table, a field or a value.

    What to do: correct the place in the TOML that it names; `kvframework config check FILE` says the same."""


class ConfigFileError(ConfigError, code="config.file"):
    """The configuration file cannot be read or is no TOML.

    What to do: check the path and its permissions, or correct the line that it names."""


class ConfigFieldError(ConfigError, code="config.field"):
    """A field of the configuration is unknown, missing, of the wrong type or nested too deep.

    What to do: correct the field that it names; `kvframework plugins info KIND.NAME` lists a plugin's options."""


class EndpointError(ConfigError, code="config.endpoint"):
    """An endpoint is malformed, too long, not private or already taken by another server.

    What to do: choose a short path in a directory of the server's user that no other user may write to; stop the
    other server that it names; give `tcp://` CURVE keys."""


class CurveKeyError(ConfigError, code="config.curve_key"):
    """A CURVE key file cannot be used or made.

    What to do: make keys with `kvframework keys new`, and keep the secret ones readable for their user only."""


class PluginError(KVFrameworkError, code="plugin.error"):
    """A plugin cannot be used.

    What to do: see the codes below."""


class PluginNotFound(PluginError, LookupError, code="plugin.not_found"):
    """No installed distribution offers a plugin of this kind and name.

    What to do: install the distribution, or correct the name; `kvframework plugins list` shows what is there."""


class PluginConflict(PluginError, code="plugin.conflict"):
    """Two distributions offer the same kind and name.

    What to do: uninstall all but one of the distributions that it names."""


class PluginBroken(PluginError, code="plugin.broken"):
    """Importing a plugin, registering it, or what its hook returned went wrong, or one of its calls did not return.

    What to do: authors: run `kvframework plugins check`; users: report it to the plugin's author, or choose
    another plugin."""


class PluginWrongKind(PluginError, code="plugin.wrong_kind"):
    """A plugin exists under this name, but of another kind, or its hook returned another kind.

    What to do: name the plugin where its kind belongs; authors: return the descriptor that the hook promises."""


class PluginWrongApi(PluginError, code="plugin.wrong_api"):
    """A plugin needs another version of the plugin API, or its distribution asks for another release of kvframework.

    What to do: install a release of the plugin for this kvframework, or another kvframework; see
    `docs/plugins/compatibility.md`."""


class PluginUnavailable(PluginError, code="plugin.unavailable"):
    """A plugin is installed, but its probe says why it cannot run here.

    What to do: the text says what is missing, and the command that installs it."""


class ProtocolError(KVFrameworkError, code="protocol.error"):
    """A message breaks the wire protocol.

    What to do: look for a client that is not kvframework's; between the same releases it is a bug to report."""


class MalformedFrames(ProtocolError, ValueError, code="protocol.frames"):
    """The frames of a message have a wrong number, size or order.

    What to do: as for `protocol.error`; the server's log names the process."""


class UnknownRequest(ProtocolError, LookupError, code="protocol.unknown_request"):
    """The request type is not in the server's table.

    What to do: install the same release on both sides; for a plugin's request add its `[[requests]]` table to
    the server's TOML."""


class InvalidPayload(ProtocolError, ValueError, code="protocol.payload"):
    """The payload frame does not decode into the request's struct.

    What to do: send the struct that the request's table names; fields are added, never retyped."""


class MessageTooLarge(ProtocolError, ValueError, code="protocol.too_large"):
    """A message, frame or field is larger than the bound for it.

    What to do: keep to the bound that it names: fewer chunks, shorter names, or a smaller `chunk_size`."""


class VersionMismatch(ProtocolError, code="protocol.version"):
    """Client and server share no protocol version, or differ in something that must be equal.

    What to do: install the same release on both sides, and give both the same hasher; then restart the engine."""


class HelloRequired(ProtocolError, code="protocol.hello_required"):
    """A request arrived before HELLO, or from a session that has ended.

    What to do: connect again: `KVClient` does so by itself."""


class RequestError(KVFrameworkError, ValueError, code="request.invalid"):
    """A well-formed request asks for something impossible.

    What to do: the text says what was asked for and what would be accepted."""


class NotRegistered(RequestError, LookupError, code="request.not_registered"):
    """No context is registered under this instance id by this client.

    What to do: register the instance (again): `WorkerAdapter` does so by itself."""


class AlreadyRegistered(RequestError, code="request.already_registered"):
    """A context is registered under this instance id already.

    What to do: give every worker process an instance id of its own, or unregister first."""


class NamespaceMismatch(RequestError, code="request.namespace"):
    """The key names another namespace, model, world size or rank than the one registered.

    What to do: build scheduler and workers with one identity: model, revision, world size, layout, hasher, chunk
    size."""


class BadRange(RequestError, code="request.range"):
    """`start`, `end` and the content of a key do not fit each other or the chunk size.

    What to do: begin and end at whole chunks, and pass the content from the first token to `end`."""


class BadBlockIds(RequestError, code="request.block_ids"):
    """Block ids are out of range, or not as many as the key's tokens need.

    What to do: pass a list of ids for each layer group, below its number of blocks, as many as the tokens fill."""


class BadLayout(RequestError, code="request.layout"):
    """A layout declaration is contradictory, ambiguous or too large.

    What to do: declare the axis, group or size that it names; nothing is guessed. See `docs/plugins/layouts.md`."""


class BadDtype(BadLayout, code="request.dtype"):
    """A dtype name that does not exist.

    What to do: give torch's name without `torch.`."""


class LeaseUnknown(RequestError, LookupError, code="request.lease"):
    """The lease or ticket does not exist, has ended, or belongs to another client.

    What to do: treat it as failed and ask again; leases end with their time, their client, or a restart."""


class TransportMismatch(RequestError, code="request.transport"):
    """The request does not fit the transport that this instance was registered with.

    What to do: add the transport's `[[transport]]` table to the server's TOML, or choose one that both sides
    have."""


class DeadlineExceeded(KVFrameworkError, TimeoutError, code="run.deadline"):
    """A wait ended before the answer came.

    What to do: take it as a miss; if it repeats, `kvframework status` shows what the server waits for."""


class ServerGone(KVFrameworkError, ConnectionError, code="run.server_gone"):
    """The server cannot be reached, has ended or was replaced by another boot.

    What to do: nothing: the client connects again by itself, and misses until then. Look why the server ended."""


class Cancelled(KVFrameworkError, code="run.cancelled"):
    """The request was cancelled.

    What to do: nothing: a caller asked for it."""


class HandlerFailed(KVFrameworkError, RuntimeError, code="run.handler"):
    """A request handler raised an unexpected exception; the server's log holds the traceback.

    What to do: read the server's log and report it; for a plugin's request, to its author."""


class ShuttingDown(KVFrameworkError, ConnectionError, code="run.shutting_down"):
    """The server is stopping.

    What to do: nothing: the client connects again once a server is there."""


class ServerFull(KVFrameworkError, ConnectionError, code="run.server_full"):
    """The server takes no further client: too many sessions are open, or too many of its descriptors are in use.

    What to do: nothing for a moment: the client tries again by itself, and misses until then. If it stays, see who
    holds so many connections, or raise the server's limit (`LimitNOFILE`)."""


class OutOfResources(KVFrameworkError, OSError, code="run.resources"):
    """This process has too few descriptors or threads left for a connection to the server.

    What to do: raise the limit that it names; the client connects by itself once there are enough, and misses until
    then."""


class StorageError(KVFrameworkError, code="storage.error"):
    """Storage failed.

    What to do: raise `[l1] capacity` if it says that there is no room; else see the server's log."""


class ArenaError(StorageError, MemoryError, code="storage.arena"):
    """The L1 arena cannot be created or mapped.

    What to do: lower `[l1] capacity`, or give the machine or container more memory."""


class TierError(StorageError, OSError, code="storage.tier"):
    """A whole operation of an L2 tier failed. Distinct from a key that is missing.

    What to do: look at the store that it names; until it is back its values are misses."""


class DeviceError(KVFrameworkError, RuntimeError, code="device.error"):
    """One operation on an accelerator failed; others may work.

    What to do: nothing for a single one: it is a miss. If it repeats, see the device's and the kernel's log."""


class DeviceLost(DeviceError, code="device.lost"):
    """An accelerator's context is poisoned, its copier process ended or the device is lost: nothing works until a new
    process opens it.

    What to do: nothing: the copier starts again, and instances register again. If it repeats, check the device."""
