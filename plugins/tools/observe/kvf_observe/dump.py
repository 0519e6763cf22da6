"""`kvframework dump`: one file for a bug report, without secrets: a tar archive that only its user may read."""

from __future__ import annotations

import io
import json
import os
import platform
import subprocess
import sys
import tarfile
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from importlib.metadata import distributions
from pathlib import Path
from typing import Annotated, Any

import typer

from kvframework.api.command import ConfigFile, Endpoint, Overrides, examples
from kvframework.api.console import print_text
from kvframework.client import StatusSource, quiet_connection, server_endpoint
from kvframework.errors import ConfigFileError, KVFrameworkError

app = typer.Typer()
FOLDER = "kvframework-dump"
# The parts that only a server has, and the files that they are in.
OF_THE_SERVER = {
    "status": "status.json",
    "config": "config.json",
    "log": "log.txt",
    "threads": "threads.txt",
    "requests": "requests.json",
}
# A check of the doctor takes 5 s at most, and several run at once.
_COMMAND_S = 120.0


@app.command("dump", epilog=examples("kvframework dump", "kvframework dump --config kvf.toml --out report.tar.gz"))
def dump(
    out: Annotated[
        Path | None, typer.Option(help="The file to write; default: kvframework-dump-TIME.tar.gz in this folder.")
    ] = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
    endpoint: Endpoint = None,
    timeout: Annotated[float, typer.Option(min=0.01, max=3600, help="Seconds to wait for the server.")] = 10.0,
) -> None:
    """Write the facts that a bug report needs, about the server and this machine, into one file.

    That is the server's status, its configuration, its last log lines, the stacks of its threads and its last requests;
    the versions of what is installed; and what `kvframework doctor` and `kvframework plugins list` say. Secrets, salts,
    keys, digests and the names of models are left out or replaced. Of a server that does not answer the file has the
    rest, and says what is missing. Run it as the server's user on its node.
    """
    place = out or Path(f"{FOLDER}-{time.strftime('%Y%m%d-%H%M%S')}.tar.gz")
    with BundleFile(place) as file:
        files, missing = collect(config, overrides or (), endpoint, timeout_s=timeout)
        if missing:
            files["missing.txt"] = "".join(f"{name}: {reason}\n" for name, reason in missing.items())
        file.write(files)
    for reason in dict.fromkeys(missing.values()):
        print_text(f"{', '.join(part for part, why in missing.items() if why == reason)}: {reason}")
    print_text(f"wrote {place}; read the file before you send it")


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
    return ConfigFileError(
        f"the dump file cannot be written: {error.strerror or error}", where=str(place), hint="give --out a new file"
    )


def versions() -> dict[str, object]:
    """Return the versions of all that is installed, without the name of the machine. Blocking: reads metadata."""
    return {
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "libc": " ".join(platform.libc_ver()),
        "kernel": f"{platform.release()} {platform.machine()}",
        "cpus": os.cpu_count(),
        "distributions": dict(sorted((each.name, each.version) for each in distributions())),
    }


def collect(
    config: Path | None, overrides: Sequence[str], endpoint: str | None, *, timeout_s: float
) -> tuple[dict[str, str], dict[str, str]]:
    """Return texts by the names of their files, and reasons by the names of those that are missing. Blocks for the
    server up to `timeout_s`, and for other commands. Raises nothing for a part that cannot be had."""
    files, missing = {"versions.json": _json(versions())}, dict[str, str]()
    given = ["--config", str(config)] if config else []
    given += [word for each in overrides for word in ("--set", each)]
    commands = {"doctor.json": ["doctor", *given], "plugins.json": ["plugins", "list"]}
    try:
        document = _asked(server_endpoint(endpoint, config), timeout_s)
    except KVFrameworkError as error:
        missing |= dict.fromkeys(OF_THE_SERVER.values(), " ".join(str(error).split()))
        commands["config.json"] = ["config", "show", *given]
    else:
        for part, name in OF_THE_SERVER.items():
            files[name] = _text(document[part], name)
    for name, words in commands.items():
        said = _printed(*words, "--json")
        if not said.startswith(("{", "[")):
            missing[name] = f"`kvframework {' '.join(words[:2])}` failed"
            continue
        files[name] = said
        if name in missing:
            missing[name] = "the server did not answer, so `kvframework dump` read this configuration itself"
    return files, missing


def _asked(endpoint: str, timeout_s: float) -> Mapping[str, Any]:
    quiet_connection()
    with closing(StatusSource(endpoint, timeout_s, name="dump")) as source:
        document: Mapping[str, Any] = json.loads(source.dump())
    return document


def _printed(*words: str) -> str:
    """Return what another command prints, which masks the secrets of the configuration."""
    program = f"import sys; sys.path[:] = {sys.path!r}; from kvframework.cli.main import main; main()"
    try:
        done = subprocess.run(
            [sys.executable, "-c", program, *words], capture_output=True, timeout=_COMMAND_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode(errors="replace")


def _text(part: Any, name: str) -> str:
    if name.endswith(".json"):
        return _json(part)
    if isinstance(part, dict):
        return "\n".join(f"{title}\n{text}" for title, text in part.items())
    return "".join(f"{line}\n" for line in part)


def _json(document: object) -> str:
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"
