"""The contents of a bug report: each part is collected by itself, and the failure of one is said in its place."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import Distribution, PackageNotFoundError, distribution, distributions
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

import kvframework
from kvframework.cli.status_source import quiet_connection, server_endpoint
from kvframework.client.connection import KVClient
from kvframework.config import load_config
from kvframework.doctor.checkup import examine
from kvframework.errors import ConfigError, KVFrameworkError
from kvframework.masking import secrets_of
from kvframework.redaction import Redaction
from kvframework.registry import PluginRegistry, named_tables, resolve_table
from kvframework.running_config import shown_config
from kvframework.wire import messages as m

# Beside kvframework's own requirements.
ENGINES = ("torch", "vllm", "sglang", "transformers", "numpy")


def versions() -> dict[str, object]:
    """Return the versions, without the name of the machine. Blocking: reads the metadata of all distributions."""
    return {
        "kvframework": kvframework.__version__,
        "python": platform.python_version(),
        "implementation": platform.python_implementation(),
        "libc": " ".join(platform.libc_ver()),
        "kernel": f"{platform.release()} {platform.machine()}",
        "cpus": os.cpu_count(),
        "distributions": _distributions(),
    }


def _distributions() -> dict[str, str]:
    plugins = [each for each in distributions() if any(e.group.startswith("kvframework.") for e in each.entry_points)]
    names = {_name(requirement) for each in plugins for requirement in each.requires or ()} | set(ENGINES)
    found = {each.name: each.version for each in plugins}
    for name in names:
        installed = _installed(name)
        if installed is not None:
            found[installed.name] = installed.version
    return dict(sorted(found.items()))


def _name(requirement: str) -> str:
    return re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0]


def _installed(name: str) -> Distribution | None:
    try:
        return distribution(name)
    except PackageNotFoundError:
        return None


CONNECT_S = 5.0
# The parts that only a server has, and the files that they are in.
OF_THE_SERVER = {
    "status": "status.json",
    "config": "config.json",
    "log": "log.txt",
    "threads": "threads.txt",
    "requests": "requests.json",
}


class Contents(NamedTuple):
    """Texts by the names of their files, and the reasons by the parts that are missing."""

    files: dict[str, str]
    missing: dict[str, str]


def collect(path: Path | None, overrides: Sequence[str], endpoint: str | None, *, timeout_s: float) -> Contents:
    """Collect all parts. Blocks for the server up to `timeout_s`, and for the doctor. Raises nothing for a part that
    cannot be had."""
    redaction = Redaction(secrets_in(path, overrides))
    missing: dict[str, str] = {}
    made: dict[str, Callable[[], str]] = {
        "versions.json": lambda: _json(versions()),
        "doctor.json": lambda: _json(msgspec.to_builtins(examine(path, overrides))),
    }
    files: dict[str, str] = {}
    for name, make in made.items():
        try:
            files[name] = _json(redaction.document(json.loads(make())))
        except Exception as error:  # noqa: BLE001  the other parts are worth having
            missing[name] = redaction.text(f"{type(error).__name__}: {error}")
    try:
        document = _ask(server_endpoint(endpoint, path), timeout_s)
    except KVFrameworkError as error:
        reason = redaction.text(" ".join(str(error).split()))
        missing |= dict.fromkeys(OF_THE_SERVER.values(), reason)
        with contextlib.suppress(KVFrameworkError):
            files["config.json"] = redaction.text(_json(_own_config(path, overrides)))
            missing["config.json"] = "this is the configuration that the command read itself"
    else:
        for part, name in OF_THE_SERVER.items():
            if part in document:
                files[name] = redaction.text(_text(document[part], name))
            else:
                missing[name] = "this server does not keep it"
    if missing:
        files["missing.txt"] = "".join(f"{name}: {reason}\n" for name, reason in missing.items())
    return Contents(files, missing)


def _ask(endpoint: str, timeout_s: float) -> Mapping[str, Any]:
    quiet_connection()
    with KVClient(endpoint, name="dump", connect_timeout_s=min(timeout_s, CONNECT_S)) as client:
        _ = client.hello
        reply = client.request("DUMP", m.Empty(), m.DumpReply, timeout=timeout_s)
    document: Mapping[str, Any] = msgspec.json.decode(reply.document)
    return document


def _own_config(path: Path | None, overrides: Sequence[str]) -> object:
    shown = shown_config(load_config(path, tuple(overrides)), PluginRegistry())
    return msgspec.to_builtins(shown, enc_hook=lambda value: int(value) if isinstance(value, int) else str(value))


def secrets_in(path: Path | None, overrides: Sequence[str]) -> set[str]:
    """Return the secrets of the configuration: the doctor's findings may quote it."""
    found: set[str] = set()
    try:
        config = load_config(path, tuple(overrides))
    except ConfigError:
        return found
    registry = PluginRegistry()
    for table, descriptor in named_tables(config):
        try:
            found |= secrets_of(resolve_table(registry, table, descriptor)[1])
        except KVFrameworkError:
            # Of options that fit no plugin it is not known which are secret.
            found |= {value for value in table.options.values() if isinstance(value, str)}
    return found


def _text(part: Any, name: str) -> str:
    if name.endswith(".json"):
        return _json(part)
    if isinstance(part, dict):
        return "\n".join(f"{title}\n{text}" for title, text in part.items())
    return "".join(f"{line}\n" for line in part)


def _json(document: object) -> str:
    return json.dumps(document, indent=2, ensure_ascii=False, default=str) + "\n"
