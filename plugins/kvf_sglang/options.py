"""The options of backend and linker: the `kvframework.*` keys of SGLang's extra configuration. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Annotated

import msgspec

from kvframework.api.options import Options
from kvframework.errors import ConfigFieldError

PREFIX = "kvframework."
BACKEND = "--hicache-storage-backend-extra-config"
LINKER = "linker_extra_config of --unified-cache-external-linker-config"

Seconds = Annotated[float, msgspec.Meta(gt=0, le=3600)]


class SglangOptions(Options, frozen=True):
    """Each field is the key `kvframework.<field>`."""

    endpoint: Annotated[
        str,
        msgspec.Meta(description='the server; "": $KVFRAMEWORK_ENDPOINT, then the private endpoint of this user'),
    ] = ""
    lookup_deadline_s: Annotated[
        Seconds, msgspec.Meta(description="how long one question for pages may take, with their load from L2")
    ] = 1.0
    load_deadline_s: Annotated[Seconds, msgspec.Meta(description="how long one load of up to 128 pages may take")] = 2.0
    store_deadline_s: Annotated[Seconds, msgspec.Meta(description="how long one store of up to 128 pages may take")] = (
        5.0
    )
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
        str, msgspec.Meta(description="the model's name in the cache; default: its path or name in SGLang")
    ] = ""
    weights: Annotated[
        str,
        msgspec.Meta(description="the weights' name; default: all bytes of the weight files, where they are local"),
    ] = ""


def parse_options(extra: Mapping[str, object], where: str = BACKEND) -> SglangOptions:
    """The options among SGLang's extra configuration; keys without the prefix are passed over. `where` is the place of
    the options, for messages.

    Raises `ConfigFieldError` for an unknown key or a value of the wrong type.
    """
    mine = {key.removeprefix(PREFIX): value for key, value in extra.items() if key.startswith(PREFIX)}
    known = SglangOptions.__struct_fields__
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
        return msgspec.convert(mine, SglangOptions)
    except msgspec.ValidationError as error:
        # msgspec ends with "- at `$.field`".
        text, _, place = str(error).partition(" - at `$.")
        name = place.rstrip("`")
        raise ConfigFieldError(
            text, where=f"{where}, {PREFIX}{name}" if name else where, hint="see docs/engines/sglang.md"
        ) from None
