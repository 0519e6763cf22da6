"""The engine's command: which engine it starts, and the options that connect it to a server. Pure but for `examined`,
which asks the interpreter of the engine."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from kvframework.api.installing import install_command
from kvframework.errors import ConfigFieldError

Kind = Literal["vllm", "sglang", "other"]
_EXAMINE_S = 30.0
_ENDPOINT_OPTION = "kvframework.endpoint"
# vLLM's API server as a module, for a build whose command `vllm` finds no distribution `vllm`.
_VLLM_SERVER = "vllm.entrypoints.openai.api_server"
_MODULES = {_VLLM_SERVER: "vllm", "vllm.entrypoints.cli.main": "vllm", "sglang.launch_server": "sglang"}
_TRANSFER, _BACKEND, _BACKEND_OPTIONS = (
    "--kv-transfer-config",
    "--hicache-storage-backend",
    "--hicache-storage-backend-extra-config",
)
_SGLANG_BACKEND = {
    "backend_name": "kvframework",
    "module_path": "kvf_sglang.storage",
    "class_name": "KvFrameworkStorage",
}
# What SGLang needs beside its storage backend, where the command does not say otherwise. An object is a page.
_SGLANG_BESIDE = {
    "--enable-hierarchical-cache": (),
    "--page-size": ("64",),
    "--hicache-write-policy": ("write_through",),
    "--enable-cache-report": (),
}
_EXAMINE = """
import importlib.metadata as metadata, importlib.util as util, json
found = {"kvf_sglang": util.find_spec("kvf_sglang") is not None, "transfer": None}
if util.find_spec("kvf_vllm") is not None:
    import kvf_vllm
    found["transfer"] = kvf_vllm.transfer_config()
named = any(each.metadata["Name"] == "vllm" for each in metadata.distributions())
found["vllm"] = named or util.find_spec("vllm") is None
print(json.dumps(found))
"""


class Installed(msgspec.Struct, frozen=True):
    """What the engine's interpreter has: the `kv_transfer_config` that `kvf_vllm` recommends, None without it; whether
    there is `kvf_sglang`; whether the command `vllm` can start, which it cannot where there is vLLM and no distribution
    `vllm`."""

    transfer: dict[str, Any] | None = None
    kvf_sglang: bool = False
    vllm: bool = True


class Connected(NamedTuple):
    """The command to run, and what to say about it, one line each."""

    command: list[str]
    notes: list[str]


def kind_of(command: Sequence[str]) -> Kind:
    """Return which engine the command starts; "other" for a script and anything unknown."""
    name, rest = Path(command[0]).name, command[1:]
    if name in ("vllm", "sglang"):
        return name if rest[:1] == ["serve"] else "other"  # type: ignore[return-value]
    if _is_python(name):
        return _MODULES.get(_module_of(rest), "other")  # type: ignore[return-value]
    return "other"


def _is_python(name: str) -> bool:
    return re.fullmatch(r"python[0-9.]*", name) is not None


def _module_of(arguments: Sequence[str]) -> str:
    """Return the module of `python -m MODULE`, behind options of Python that take no value; "" for none."""
    for at, argument in enumerate(arguments):
        if argument == "-m":
            return arguments[at + 1] if at + 1 < len(arguments) else ""
        if not argument.startswith("-"):
            break
    return ""


def interpreter_of(command: Sequence[str]) -> str:
    """Return the Python that runs the command: itself, or that of a script's first line; else this process's."""
    found = shutil.which(command[0])
    if found is not None and _is_python(Path(found).name):
        return found
    try:
        with open(found or "", "rb") as script:
            first = script.readline(1024).decode(errors="replace")
    except OSError:
        return sys.executable
    words = first.removeprefix("#!").split()
    return words[0] if first.startswith("#!") and words and _is_python(Path(words[0]).name) else sys.executable


def examined(command: Sequence[str]) -> Installed:
    """Ask the engine's interpreter what it has; nothing where it does not answer. Blocks for some 0.1 s, at most for
    `_EXAMINE_S`."""
    asked = [interpreter_of(command), "-c", _EXAMINE]
    try:
        done = subprocess.run(asked, capture_output=True, timeout=_EXAMINE_S, check=True, stdin=subprocess.DEVNULL)
        return msgspec.json.decode(done.stdout, type=Installed)
    except (OSError, subprocess.SubprocessError, msgspec.DecodeError):
        return Installed()


def connected(command: Sequence[str], installed: Installed, endpoint: str) -> Connected:
    """Return the command with the options that connect its engine to the server at `endpoint`, which the environment
    names. Options of the user stay. Raises `ConfigFieldError` where they contradict."""
    kind = kind_of(command)
    if kind == "vllm":
        return _vllm(list(command), installed, endpoint)
    if kind == "sglang":
        return _sglang(list(command), installed, endpoint)
    name = " ".join(command)[:60]
    note = f"{name!r} is not a known command of vLLM or SGLang, so it gets $KVFRAMEWORK_ENDPOINT but no options"
    return Connected(list(command), [] if _is_script(command) else [note])


def _is_script(command: Sequence[str]) -> bool:
    """Whether it is Python code, which connects itself, by the integration of transformers or `vllm.LLM`."""
    return _is_python(Path(command[0]).name) or command[0].endswith(".py") or Path(command[0]).name == "torchrun"


def _vllm(command: list[str], installed: Installed, endpoint: str) -> Connected:
    notes = []
    if not installed.vllm and Path(command[0]).name == "vllm":
        command = _as_module(command)
        notes.append(f"the command `vllm` needs the distribution vllm, so python -m {_VLLM_SERVER} starts instead")
    given = _value_of(command, _TRANSFER)
    if given is not None:
        _check_transfer(given, endpoint)
        return Connected(command, notes)
    if in_file := _transfer_of_file(command):
        raise ConfigFieldError(
            f"{in_file} has {_TRANSFER.removeprefix('--')}, and `kvframework run` adds {_TRANSFER}",
            where="kvframework run",
            hint=f"remove the option from {in_file}, or start the engine without `kvframework run`",
        )
    if installed.transfer is None:
        hint = install_command(distribution="kvframework-vllm")
        note = f"vLLM runs without the cache, because its environment lacks kvframework-vllm: {hint}"
        return Connected(command, [*notes, note])
    return Connected([*command, _TRANSFER, json.dumps(installed.transfer)], notes)


def _as_module(command: list[str]) -> list[str]:
    """Return `vllm serve MODEL ...` as the module that does the same."""
    rest = command[2:]
    model = ["--model", rest.pop(0)] if rest and not rest[0].startswith("-") else []
    return [interpreter_of(command), "-m", _VLLM_SERVER, *model, *rest]


def _check_transfer(given: str, endpoint: str) -> None:
    try:
        config: Any = json.loads(given)
    except ValueError:
        return  # vLLM says what is wrong with it
    connector = str(config.get("kv_connector", "")) if isinstance(config, Mapping) else ""
    nested = str(config.get("kv_connector_extra_config", "")) if isinstance(config, Mapping) else ""
    if not connector.startswith("KvFramework") and "KvFramework" not in nested:
        raise _contradiction(f"{_TRANSFER} names the connector {connector!r}", "kvframework's connector")
    options = config.get("kv_connector_extra_config")
    named = options.get(_ENDPOINT_OPTION, "") if isinstance(options, Mapping) else ""
    if named and named != endpoint:
        raise _contradiction(f"{_TRANSFER} names the server {named}", f"the server {endpoint}")


def _transfer_of_file(command: Sequence[str]) -> str:
    """Return the file of `--config` if a line of it begins with vLLM's option, else ""."""
    file = _value_of(command, "--config")
    try:
        text = Path(file).read_text(errors="replace") if file else ""
    except OSError:
        return ""  # vLLM says what is wrong with it
    return file if file and re.search(r"^\s*kv[-_]transfer[-_]config\s*:", text, re.MULTILINE) else ""


def _sglang(command: list[str], installed: Installed, endpoint: str) -> Connected:
    if not installed.kvf_sglang:
        hint = install_command(distribution="kvframework-sglang")
        return Connected(
            command, [f"SGLang runs without the cache, because its environment lacks kvframework-sglang: {hint}"]
        )
    backend, options = _value_of(command, _BACKEND), _value_of(command, _BACKEND_OPTIONS)
    if backend not in (None, "dynamic"):
        raise _contradiction(f"{_BACKEND} is {backend!r}", f"{_BACKEND} dynamic")
    if options is not None:
        if _SGLANG_BACKEND["module_path"] not in options:
            raise _contradiction(f"{_BACKEND_OPTIONS} is {options}", json.dumps(_SGLANG_BACKEND))
        try:
            named = str(json.loads(options).get(_ENDPOINT_OPTION, ""))
        except (ValueError, AttributeError):
            named = ""  # SGLang says what is wrong with it
        if named and named != endpoint:
            raise _contradiction(f"{_BACKEND_OPTIONS} names the server {named}", f"the server {endpoint}")
    added = [word for name, values in _SGLANG_BESIDE.items() if not _has(command, name) for word in (name, *values)]
    if backend is None:
        added += [_BACKEND, "dynamic"]
    if options is None:
        added += [_BACKEND_OPTIONS, json.dumps(_SGLANG_BACKEND)]
    return Connected([*command, *added], [])


def _contradiction(theirs: str, ours: str) -> ConfigFieldError:
    return ConfigFieldError(
        f"the engine's command contradicts `kvframework run`: {theirs}",
        where="kvframework run",
        available=ours,
        hint="leave out the option, or start the engine without `kvframework run`",
    )


def _has(command: Sequence[str], name: str) -> bool:
    return _value_of([*command, ""], name) is not None


def _value_of(command: Sequence[str], name: str) -> str | None:
    """Return the last value of an option, written with "=" or without, with "-" or "_"; None where it is not given."""
    found = None
    for at, word in enumerate(command):
        option, equals, value = word.partition("=")
        if option.startswith("--") and f"--{option[2:].replace('_', '-')}" == name:
            found = value if equals else command[at + 1] if at + 1 < len(command) else None
        elif option.startswith(f"{name}."):  # vLLM takes one key of the JSON so
            found = json.dumps({option.removeprefix(f"{name}."): value if equals else command[at + 1]})
    return found


def environment(endpoint: str, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    return {**environ, "KVFRAMEWORK_ENDPOINT": endpoint}
