"""The connector's options: the `kvframework.*` keys of vLLM's `kv_connector_extra_config`. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec

from kvframework.api.options import Options
from kvframework.errors import ConfigFieldError

PREFIX = "kvframework."
WHERE = "kv_transfer_config.kv_connector_extra_config"

Seconds = Annotated[float, msgspec.Meta(gt=0, le=3600)]


class VllmOptions(Options, frozen=True):
    """Each field is the key `kvframework.<field>`."""

    endpoint: Annotated[
        str,
        msgspec.Meta(description='the server; "": $KVFRAMEWORK_ENDPOINT, then the private endpoint of this user'),
    ] = ""
    load: Annotated[
        Literal["async", "sync"],
        msgspec.Meta(
            description='"async": requests wait for their load while others run, and a whole prompt may be loaded; '
            '"sync": loads happen within the step that uses them, only for models with one KV group'
        ),
    ] = "async"
    layout: Annotated[
        Literal["opaque", "canonical"],
        msgspec.Meta(
            description='"opaque": blocks are stored as they lie, for engines that lay them out alike; "canonical": '
            "element by element, also for engines that lay them out otherwise, where that is exact"
        ),
    ] = "opaque"
    lookup_deadline_s: Annotated[
        Seconds, msgspec.Meta(description="how long a request may wait for its load from L2")
    ] = 2.0
    connect_timeout_s: Annotated[
        Seconds, msgspec.Meta(description="how long the engine's start waits for a server; later it is found by itself")
    ] = 5.0
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
    model: Annotated[str, msgspec.Meta(description="the model's name in the cache; default: its name in vLLM")] = ""
    weights: Annotated[
        str,
        msgspec.Meta(description="the weights' name; default: all bytes of the weight files, where they are local"),
    ] = ""
    announce_salts: Annotated[
        bool,
        msgspec.Meta(
            description="true: events for routers name salted blocks with their salt, which every subscriber learns; "
            "false: salted blocks are not announced"
        ),
    ] = False
    min_hit_tokens: Annotated[
        int, msgspec.Meta(ge=0, le=1 << 24, description="external hits of fewer tokens are computed instead")
    ] = 0


def parse_options(extra: Mapping[str, object]) -> VllmOptions:
    """The options among vLLM's extra configuration; keys without the prefix are passed over.

    Raises `ConfigFieldError` for an unknown key or a value of the wrong type.
    """
    mine = {key.removeprefix(PREFIX): value for key, value in extra.items() if key.startswith(PREFIX)}
    known = VllmOptions.__struct_fields__
    for name in mine:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            raise ConfigFieldError(
                f"there is no option {PREFIX}{name}",
                where=WHERE,
                available=", ".join(PREFIX + each for each in known),
                hint=f"did you mean {PREFIX}{close[0]}?" if close else "leave it out",
            )
    try:
        return msgspec.convert(mine, VllmOptions)
    except msgspec.ValidationError as error:
        # msgspec ends with "- at `$.field`".
        text, _, place = str(error).partition(" - at `$.")
        name = place.rstrip("`")
        raise ConfigFieldError(
            text, where=f"{WHERE}.{PREFIX}{name}" if name else WHERE, hint="see docs/engines/vllm.md"
        ) from None
