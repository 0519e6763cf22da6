"""The checks of `kvframework doctor` for the peers tier: which nodes answer, and whether they can share. Runs in a
process of its own; changes nothing."""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from kvf_peers import PeersOptions
from kvf_peers.holder import bound
from kvf_peers.messages import ProtocolError, Welcome
from kvf_peers.settings import Address, Settings, read_settings
from kvf_peers.wire import NotTrusted, Wire, explain, introduce
from kvframework.api.plugin import Finding, TableContext

_MOST_S = 2.0
# What a node says that is there, and that this one cannot share with.
_NO_TRUST = (NotTrusted, ssl.SSLError)


def diagnose(options: PeersOptions, context: TableContext, deadline: float) -> list[Finding]:
    """Say hello to the nodes of `peers` and to this one; blocks until `deadline` at most. Raises
    `ConfigFieldError`."""
    settings = read_settings(options, where=context.where)
    own = settings.listen
    asked = list(dict.fromkeys(each for each in (own, *settings.peers) if each is not None))
    until = min(deadline, time.monotonic() + _MOST_S)
    with ThreadPoolExecutor(max(len(asked), 1)) as pool:
        answers = list(pool.map(lambda each: _hello(each, settings, until), asked))
    known = {address: who for address, who in zip(asked, answers, strict=True) if isinstance(who, Welcome)}
    failed = {address: why for address, why in zip(asked, answers, strict=True) if isinstance(why, Exception)}
    apart = {address: failed.pop(address) for address, why in [*failed.items()] if isinstance(why, _NO_TRUST)}
    findings = [_network(settings)]
    if own is not None and own in failed:
        del failed[own]
        findings += _listens(own)
    return [*findings, *_reachable(known, failed), *_trusted(apart), *_agreement(known)]


def _listens(own: Address) -> Iterator[Finding]:
    """Whether this node, which does not answer, could listen; without a finding if it can."""
    try:
        bound(own).close()
    except OSError as error:
        advice = "set listen to a free address of this machine: until then other nodes load nothing from this node"
        yield Finding("peers.listen", "fail", f"{own}: {explain(error)}", advice)


def _network(settings: Settings) -> Finding:
    if settings.tls is not None:
        return Finding("peers.network", "ok", "nodes use TLS in both directions, and the token")
    if settings.options.trusted_network:
        fact = "trusted_network: the KV of prompts is sent in plain text"
        return Finding("peers.network", "warn", fact, "admit only the nodes to that network, or set tls_ca")
    return Finding("peers.network", "ok", "all addresses are of this machine")


def _hello(address: Address, settings: Settings, until: float) -> Welcome | Exception:
    try:
        sock = socket.create_connection(address, max(until - time.monotonic(), 0.01))
    except OSError as error:
        return error
    wire = Wire(sock)
    try:
        return introduce(wire, settings, address.host, until)
    except (OSError, EOFError, ProtocolError) as error:
        return error
    finally:
        wire.close()


def _trusted(apart: dict[Address, Exception]) -> Iterator[Finding]:
    if apart:
        advice = "give all nodes the same token, the same release, and certificates signed by the same tls_ca"
        yield Finding("peers.trust", "fail", "; ".join(_why(apart)), advice)


def _why(failed: dict[Address, Exception]) -> list[str]:
    return [f"{address}: {explain(error)}" for address, error in failed.items()]


def _reachable(known: dict[Address, Welcome], silent: dict[Address, Exception]) -> Iterator[Finding]:
    answered = f"{', '.join(map(str, known))} answered" if known else ""
    if silent:
        fact = "; ".join([*_why(silent), *([answered] if answered else [])])
        yield Finding(
            "peers.reachable", "warn", fact, "start that node, or correct peers; until then the tier skips the node"
        )
    elif answered:
        yield Finding("peers.reachable", "ok", answered)


def _agreement(known: dict[Address, Welcome]) -> Iterator[Finding]:
    """Whether the nodes name the same content alike: compared with the first that answered, this one if it
    runs."""
    if len(known) < 2:
        return
    (first, like), *others = known.items()
    facts: list[str] = []
    for address, who in others:
        if who.chunk_size != like.chunk_size:
            facts.append(
                f"{address} has chunk_size {who.chunk_size}, {first} has {like.chunk_size}, so they share no KV"
            )
        elif who.hasher != like.hasher:
            facts.append(f"{address} and {first} differ in the hasher or its seed, so they share no KV")
        for model in sorted(set(who.models) & set(like.models)):
            if not set(who.models[model]) & set(like.models[model]):
                facts.append(
                    f"the engines of {model!r} at {address} and {first} differ, so the nodes share no KV of this model"
                )
    if facts:
        advice = "give all nodes the same chunk_size and [hasher], and all engines of a model the same dtype and layout"
        yield Finding("peers.names", "fail", "; ".join(facts), advice)
    else:
        yield Finding("peers.names", "ok", f"{len(known)} nodes name the same content alike")
