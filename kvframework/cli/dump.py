"""`kvframework dump`: one file for a bug report, without secrets: a tar archive that only its user may read."""

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
from importlib.metadata import PackageNotFoundError, distribution, distributions
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import typer

import kvframework
from kvframework.api.command import Endpoint, examples
from kvframework.cli.console import print_text
from kvframework.cli.usage import CONFIG_HELP, Overrides
from kvframework.client import KVClient
from kvframework.client.status_source import quiet_connection, server_endpoint
from kvframework.config import load_config
from kvframework.doctor.checkup import examine
from kvframework.errors import ConfigError, ConfigFileError, KVFrameworkError
from kvframework.masking import Redaction, secrets_of
from kvframework.registry import PluginRegistry, named_tables, resolve_table
from kvframework.running_config import shown_config
from kvframework.text import described
from kvframework.wire import messages as m

app = typer.Typer()
FOLDER = "kvframework-dump"
CONNECT_S = 5.0
# The parts that only a server has, and the files that they are in.
OF_THE_SERVER = {
    "status": "status.json",
    "config": "config.json",
    "log": "log.txt",
    "threads": "threads.txt",
    "requests": "requests.json",
}


@app.command(
    epilog=examples(
        "kvframework dump",
        "kvframework dump --config kvf.toml --out report.tar.gz",
    )
)
def dump(
    out: Annotated[
        Path | None, typer.Option(help="The file to write; without it kvframework-dump-TIME.tar.gz, here.")
    ] = None,
    config: Annotated[Path | None, typer.Option("--config", help=CONFIG_HELP)] = None,
    overrides: Overrides = None,
    endpoint: Endpoint = None,
    timeout: Annotated[float, typer.Option(min=0.01, max=3600, help="Seconds to wait for the server.")] = 10.0,
) -> None:
    """Write what a bug report needs into one file: of the server, and of this machine.

    That is the server's status, its configuration, its last log lines, the stacks of its threads and its last requests;
    versions; and the checks of `kvframework doctor`. Secrets, salts, keys, digests and the names of models are left
    out or replaced. Of a server that does not answer the file has the rest, and says what is missing. Run it as the
    server's user on its node.
    """
    place = out or Path(f"{FOLDER}-{time.strftime('%Y%m%d-%H%M%S')}.tar.gz")
    with BundleFile(place) as file:
        contents = collect(config, overrides or (), endpoint, timeout_s=timeout)
        file.write(contents.files)
    for reason in dict.fromkeys(contents.missing.values()):
        print_text(f"{', '.join(part for part, why in contents.missing.items() if why == reason)}: {reason}")
    print_text(f"{place}: read it before you send it")


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
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w:gz") as archive:
            for name, text in files.items():
                data = text.encode("utf-8", "backslashreplace")
                entry = tarfile.TarInfo(f"{self._folder}/{name}")
                entry.size, entry.mtime, entry.mode = len(data), int(time.time()), 0o600
                archive.addfile(entry, io.BytesIO(data))
        try:
            # Closed here in any case: what a full disk has not taken would fail once more at the end.
            with self._file:
                self._file.write(packed.getvalue())
        except OSError as error:
            raise _refusal(self.place, error) from None


def _refusal(place: Path, error: OSError) -> ConfigFileError:
    return ConfigFileError(f"cannot be written: {error.strerror or error}", where=str(place), hint="name a new file")


# Beside kvframework's own requirements.
ENGINES = ("torch", "vllm", "sglang", "transformers", "numpy")


def versions() -> dict[str, object]:
    """Return the versions, without the name of the machine. Blocking: reads the metadata of all distributions."""
    plugins = [each for each in distributions() if any(e.group.startswith("kvframework.") for e in each.entry_points)]
    found = {each.name: each.version for each in plugins}
    needed = {re.split(r"[^A-Za-z0-9._-]", text, maxsplit=1)[0] for each in plugins for text in each.requires or ()}
    for name in needed | set(ENGINES):
        with contextlib.suppress(PackageNotFoundError):
            installed = distribution(name)
            found[installed.name] = installed.version
    return {
        "kvframework": kvframework.__version__,
        "python": platform.python_version(),
        "implementation": platform.python_implementation(),
        "libc": " ".join(platform.libc_ver()),
        "kernel": f"{platform.release()} {platform.machine()}",
        "cpus": os.cpu_count(),
        "distributions": dict(sorted(found.items())),
    }


class Contents(NamedTuple):
    """Texts by the names of their files, and the reasons by the parts that are missing."""

    files: dict[str, str]
    missing: dict[str, str]


def collect(path: Path | None, overrides: Sequence[str], endpoint: str | None, *, timeout_s: float) -> Contents:
    """Collect all parts. Blocks for the server up to `timeout_s`, and for the doctor. Raises nothing for a part that
    cannot be had."""
    redaction = Redaction(secrets_in(path, overrides))
    files: dict[str, str] = {}
    missing: dict[str, str] = {}
    made: dict[str, Callable[[], object]] = {
        "versions.json": versions,
        "doctor.json": lambda: msgspec.to_builtins(examine(path, overrides)),
    }
    for name, make in made.items():
        try:
            files[name] = _json(redaction.document(make()))
        except Exception as error:  # noqa: BLE001  the other parts are worth having
            missing[name] = redaction.text(described(error))
    try:
        document = _ask(server_endpoint(endpoint, path), timeout_s)
    except KVFrameworkError as error:
        reason = redaction.text(" ".join(str(error).split()))
        missing |= dict.fromkeys(OF_THE_SERVER.values(), reason)
        with contextlib.suppress(KVFrameworkError):
            shown = shown_config(load_config(path, tuple(overrides)), PluginRegistry())
            plain = msgspec.to_builtins(shown, enc_hook=lambda each: int(each) if isinstance(each, int) else str(each))
            files["config.json"] = redaction.text(_json(plain))
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
