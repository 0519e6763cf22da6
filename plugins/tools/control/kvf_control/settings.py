"""Where `kvframework control` listens: its options, and the table `[control]` of a file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import msgspec

from kvf_observe.http.messages import refusals
from kvframework.api.toml import convert, read_toml
from kvframework.errors import ConfigFieldError


class ControlConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`[control]`. `token_file` is the file of the token that every request must have, read for each."""

    listen: Annotated[str, msgspec.Meta(min_length=1)] = "127.0.0.1:9320"
    token_file: str = ""
    tls_cert: str = ""
    tls_key: str = ""


def configured(file: Path | None, given: Mapping[str, str]) -> ControlConfig:
    """Return the options that are given, and those of the file's table for all others. Blocking: it reads the files,
    and binds the port for a moment. Raises `ConfigError`."""
    table: Mapping[str, object] = {}
    if file is not None:
        found = read_toml(file, "--control").get("control", {})
        table = found if isinstance(found, dict) else {"": found}
    config: ControlConfig = convert({**table, **given}, ControlConfig, where="[control]")
    if not config.token_file:
        raise ConfigFieldError(
            "no token is configured, but clients may delete KV",
            where="kvframework control",
            hint="write a token into a file, and give --token-file",
        )
    if bool(config.tls_cert) != bool(config.tls_key):
        raise ConfigFieldError("tls_cert and tls_key must be set together", where="kvframework control")
    for refusal in refusals(config, "kvframework control"):
        raise refusal
    return config
