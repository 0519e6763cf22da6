"""The options of an engine's integration: the keys `kvframework.*` of what an engine passes on to its plugin, beside
keys of others. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Annotated, TypeVar

import msgspec

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
