"""Where `kvframework control` listens: its options, and the table `[control]` of a file or of a server."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import msgspec

from kvf_observe.http.messages import refusals
from kvframework.api.installing import install_command
from kvframework.api.plugin import Options
from kvframework.api.toml import convert, read_toml
from kvframework.errors import ConfigFieldError, PluginUnavailable


class ControlConfig(Options, frozen=True):
    """`[control]`. `token_file` is the file of the token that every request must have, read for each."""

    listen: Annotated[
        str, msgspec.Meta(min_length=1, description="`HOST:PORT` of orders over HTTP; port 0: any free port")
    ] = "127.0.0.1:9320"
    token_file: Annotated[
        str, msgspec.Meta(description="file with the token that every order must have, read for each; required")
    ] = ""
    tls_cert: Annotated[str, msgspec.Meta(description="file of the TLS certificate chain; empty: plain HTTP")] = ""
    tls_key: Annotated[str, msgspec.Meta(description="file of the private key of `tls_cert`")] = ""
    state_file: Annotated[
        str,
        msgspec.Meta(
            description="file, for its owner alone, in which pins and conversations, with their salts, outlast the"
            " process; empty: they end with it"
        ),
    ] = ""
    tokenizers: Annotated[
        dict[str, str],
        msgspec.Meta(max_length=64, description="by model: the file `tokenizer.json` for orders that name a text"),
    ] = msgspec.field(default_factory=dict)

    @property
    def state(self) -> Path | None:
        return Path(self.state_file) if self.state_file else None


def configured(file: Path | None, given: Mapping[str, str]) -> ControlConfig:
    """Return the options that are given, and those of the file's table for all others. Blocking: it reads the files,
    and binds the port for a moment. Raises `ConfigError`."""
    table: Mapping[str, object] = {}
    if file is not None:
        found = read_toml(file, "--control").get("control", {})
        table = found if isinstance(found, dict) else {"": found}
    config: ControlConfig = convert({**table, **given}, ControlConfig, where="[control]")
    check_settings(config, "kvframework control")
    return config


def check_settings(config: ControlConfig, where: str, *, running: bool = False) -> None:
    """Raise `ConfigError` for the first thing that keeps the process from starting; with `running`, its port may be
    that of one that runs. Blocking, as `configured`."""
    if not config.token_file:
        raise ConfigFieldError(
            "no token is configured, but clients may delete KV",
            where=where,
            hint="write a token into a file, and give --token-file, or token_file in [control]",
        )
    if bool(config.tls_cert) != bool(config.tls_key):
        raise ConfigFieldError("tls_cert and tls_key must be set together", where=where)
    if config.tokenizers and not find_spec("tokenizers"):
        raise PluginUnavailable(
            "the option `tokenizers` needs the library tokenizers, which is not installed",
            where=where,
            hint=install_command("text", distribution="kvframework-control"),
        )
    for model, path in config.tokenizers.items():
        if not Path(path).is_file():
            raise ConfigFieldError(f"the tokenizer of {model} is no file", where=f"{where} tokenizers", available=path)
    for refusal in refusals(config, where, running=running):
        raise refusal
