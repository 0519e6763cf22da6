"""The choice of a client's CURVE keys: those given, else those that the environment names; none for a local server."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path

from kvframework.config import parse_endpoint
from kvframework.messaging.curve import CurveKeyError, CurveKeys, LoadedKeys

log = logging.getLogger(__name__)

SECRET_VARIABLE = "KVFRAMEWORK_CURVE_SECRET"  # noqa: S105 - a name
SERVER_VARIABLE = "KVFRAMEWORK_CURVE_SERVER"


def keys_for(endpoint: str, given: CurveKeys | None, environ: Mapping[str, str] = os.environ) -> LoadedKeys | None:
    """Return the keys for a connection to `endpoint`. Blocking. Raises `EndpointError` and `CurveKeyError`."""
    if parse_endpoint(endpoint, where="endpoint").kind == "ipc":
        return None
    if given is not None:
        return given.load()
    server, secret = environ.get(SERVER_VARIABLE, ""), environ.get(SECRET_VARIABLE, "")
    if not server and not secret:
        log.warning("no CURVE keys for %s: all that is sent there can be read on its way", endpoint)
        return None
    if not server or not secret:
        raise CurveKeyError(
            f"{SECRET_VARIABLE if server else SERVER_VARIABLE} is not set",
            where=endpoint,
            hint=f"set {SERVER_VARIABLE} to the server's public key file and {SECRET_VARIABLE} to your secret one",
        )
    return CurveKeys(Path(server), Path(secret)).load()
