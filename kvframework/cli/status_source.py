"""The server that a command addresses."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from kvframework.client.connection import ENDPOINT_VARIABLE
from kvframework.config import default_endpoint, load_config


def server_endpoint(endpoint: str | None, config: Path | None) -> str:
    """Return the endpoint of the server that a command addresses: the option, the variable, the configuration."""
    return endpoint or os.environ.get(ENDPOINT_VARIABLE) or load_config(config).server.endpoint or default_endpoint()


def quiet_connection() -> None:
    """Drop the connection's log lines, which would break the picture, or repeat the error."""
    logging.getLogger("kvframework").addHandler(logging.NullHandler())
