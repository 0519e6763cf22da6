"""The beginning of a connection: TLS, the proof of the token by both sides, and who the holder is. Blocks."""

from __future__ import annotations

import hmac
import os

from kvf_peers.messages import (
    MOST_MODELS,
    MOST_NAMESPACES,
    MOST_REASON,
    NONCE_BYTES,
    STRANGER_BYTES,
    VERSION,
    FromHolder,
    FromStranger,
    Greeting,
    Hello,
    ProtocolError,
    Refused,
    Welcome,
    proof,
)
from kvf_peers.settings import Settings
from kvf_peers.wire import Wire
from kvframework.api.process import visible
from kvframework.api.tier import Node


class NotTrusted(ProtocolError):
    """One of the two sides does not know the token of the other, or speaks another version."""


def introduce(wire: Wire, settings: Settings, host: str, deadline: float) -> Welcome:
    """The reader's side: returns who the holder is. Raises `OSError`, `EOFError`, `ProtocolError`."""
    if settings.tls is not None:
        wire.start_tls(settings.tls.contexts()[0], deadline, host=host)
    token = settings.token()
    greeting = wire.read(Greeting, deadline, STRANGER_BYTES)
    if greeting.version != VERSION:
        raise NotTrusted(f"it speaks version {greeting.version} of the protocol, this node {VERSION}")
    nonce = os.urandom(NONCE_BYTES)
    said = proof(token, b"reader", greeting.nonce, nonce)
    wire.write(Hello(VERSION, nonce, said), deadline)
    answer: Welcome | Refused = wire.read(FromHolder, deadline)  # type: ignore[arg-type]
    if isinstance(answer, Refused):
        raise NotTrusted(f"it refuses this node: {visible(answer.reason[:MOST_REASON])}")
    if not hmac.compare_digest(answer.proof, proof(token, b"holder", greeting.nonce, nonce)):
        raise NotTrusted("it does not know the token")
    return answer


def admit(wire: Wire, settings: Settings, node: Node, deadline: float) -> None:
    """The holder's side. Raises `OSError`, `EOFError`, `ProtocolError`, the latter to one that does not know the token,
    which has got the reason."""
    if settings.tls is not None:
        wire.start_tls(settings.tls.contexts()[1], deadline)
    nonce = os.urandom(NONCE_BYTES)
    wire.write(Greeting(VERSION, nonce), deadline)
    hello = wire.read(FromStranger, deadline, STRANGER_BYTES)
    token = settings.token()
    if hello.version != VERSION:
        wire.write(Refused(f"version {VERSION} of the protocol is spoken here"), deadline)
        raise NotTrusted(f"version {hello.version} of the protocol")
    if not hmac.compare_digest(hello.proof, proof(token, b"reader", nonce, hello.nonce)):
        wire.write(Refused("it has another token"), deadline)
        raise NotTrusted("another token")
    identity = node.identity
    wire.write(
        Welcome(
            proof(token, b"holder", nonce, hello.nonce),
            identity.boot_id,
            identity.chunk_size,
            identity.hasher,
            told_models(node),
        ),
        deadline,
    )


def told_models(node: Node) -> dict[str, list[bytes]]:
    """The models of a node, as many as a message tells."""
    models = sorted(node.models().items())[:MOST_MODELS]
    return {name: sorted(namespaces)[:MOST_NAMESPACES] for name, namespaces in models}
