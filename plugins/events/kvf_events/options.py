"""The table `[events]`: what it may say, and what is wrong with it."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from kvframework.api.endpoint import parse_endpoint
from kvframework.api.listener import ListenerContext
from kvframework.api.plugin import Options, TableContext
from kvframework.errors import ConfigFieldError, EndpointError

Format = Literal["map", "array"]
Salted = Literal["withhold", "tell"]


class EventsOptions(Options, frozen=True):
    endpoint: Annotated[
        str, msgspec.Meta(min_length=1, description="`ipc://` or `tcp://` socket at which routers subscribe")
    ]
    replay: Annotated[str, msgspec.Meta(description="socket at which routers ask for missed events; empty: none")] = ""
    format: Annotated[
        Format, msgspec.Meta(description="format of an event: `map`, or `array` for readers of older releases")
    ] = "map"
    block_size: Annotated[
        int, msgspec.Meta(ge=1, le=65536, description="tokens in a block of the router; must divide the chunk")
    ] = 16
    salted: Annotated[
        Salted,
        msgspec.Meta(
            description="`tell`: announce prompts that have a salt, with the salt; every subscriber learns the salt"
        ),
    ] = "withhold"
    engines: Annotated[
        tuple[Annotated[str, msgspec.Meta(max_length=256, pattern="^[^@]*$")], ...],
        msgspec.Meta(
            max_length=16,
            description="the router's names of this node's engines, such as `10.0.0.7:8000`, one topic"
            ' each; empty: one topic, with the name of the machine; `[""]`: no topic, as from vLLM, for vllm-router',
        ),
    ] = ()
    state: Annotated[
        str,
        msgspec.Meta(description="folder of the ledger; empty: `$STATE_DIRECTORY`, else `~/.local/state/kvframework`"),
    ] = ""
    insecure: Annotated[
        bool, msgspec.Meta(description="send prompts over `tcp://` without encryption to any subscriber")
    ] = False


def check(options: EventsOptions, context: TableContext | ListenerContext) -> None:
    """Refuse what contradicts itself or `[server]`. Raises `EndpointError` and `ConfigFieldError`."""
    where, server = context.where, context.server
    named = {"endpoint": options.endpoint, "replay": options.replay}
    for key, endpoint in named.items():
        if not endpoint:
            continue
        is_tcp = parse_endpoint(endpoint, where=f"{where} {key}").kind == "tcp"
        if is_tcp and not server.has_keys and not options.insecure:
            raise EndpointError(
                "tcp:// needs CURVE keys, or insecure = true: events contain the token ids of prompts",
                where=f"{where} {key}",
                available="[server.curve] secret_key = FILE, clients = DIR; or [events] insecure = true",
                hint="make keys with: kvframework keys new DIR",
            )
    sockets = [each for each in (*named.values(), *server.endpoints) if each]
    if len(set(sockets)) < len(sockets):
        raise ConfigFieldError(
            "endpoint and replay have the same address", where=where, available="two different addresses"
        )
    if len(set(options.engines)) < len(options.engines):
        raise ConfigFieldError("an engine is named twice", where=f"{where} engines", available="each name once")
    if server.chunk_size % options.block_size:
        raise ConfigFieldError(
            f"block_size {options.block_size} does not divide the chunk of {server.chunk_size} tokens",
            where=f"{where} block_size",
            available=f"divisors of [server] chunk_size, {server.chunk_size}",
            hint="write the router's block size, which equals the engines' block size",
        )
