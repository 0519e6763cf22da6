"""The contents of `kvframework dump` and of the report of a GPU, and their file: a tar archive that only its user may
read."""

from __future__ import annotations

import contextlib
import io
import json
import os
import platform
import re
import tarfile
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import Distribution, PackageNotFoundError, distribution, distributions
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

import kvframework
from kvframework.client import KVClient
from kvframework.client.status_source import quiet_connection, server_endpoint
from kvframework.config import load_config
from kvframework.doctor.checkup import examine
from kvframework.errors import ConfigError, ConfigFileError, KVFrameworkError
from kvframework.masking import Redaction, secrets_of
from kvframework.registry import PluginRegistry, named_tables, resolve_table
from kvframework.running_config import shown_config
from kvframework.wire import messages as m

FOLDER = "kvframework-dump"


def default_name() -> str:
    return f"{FOLDER}-{time.strftime('%Y%m%d-%H%M%S')}.tar.gz"


class BundleFile:
    """A new, empty file at `place`, whose texts will lie in `folder`. Raises `ConfigFileError` if it exists or cannot
    be written."""

    def __init__(self, place: Path, folder: str = FOLDER) -> None:
        self.place = place
        self._folder = folder
        try:
            descriptor = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise _refusal(place, error) from None
        self._file = os.fdopen(descriptor, "wb")

    def __enter__(self) -> BundleFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._file.close()
        if kind is not None:
            self.place.unlink(missing_ok=True)

    def write(self, files: Mapping[str, str]) -> None:
        """Write texts by name, once. Raises `ConfigFileError`."""
        try:
            # Closed here in any case: what a full disk has not taken would fail once more at the end.
            with self._file:
                self._file.write(_packed(self._folder, files))
        except OSError as error:
            raise _refusal(self.place, error) from None


def _packed(folder: str, files: Mapping[str, str]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name, text in files.items():
            data = text.encode("utf-8", "backslashreplace")
            entry = tarfile.TarInfo(f"{folder}/{name}")
            entry.size, entry.mtime, entry.mode = len(data), int(time.time()), 0o600
            archive.addfile(entry, io.BytesIO(data))
    return packed.getvalue()


def _refusal(place: Path, error: OSError) -> ConfigFileError:
    return ConfigFileError(f"cannot be written: {error.strerror or error}", where=str(place), hint="name a new file")


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
