"""Which engine a command starts, and the options that it gets; the user's own stay, and contradictions are named. The
log of a server that `run` has started stays within two files, and no line is lost or cut."""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvf_run.engine import Installed, connected, examined, interpreter_of, kind_of
from kvf_run.log_file import followed, last_lines, older, write
from kvframework.errors import ConfigFieldError
from tests.support.waiting import wait_until

HERE = "ipc:///run/kvf/server.sock"
TRANSFER = {"kv_connector": "KvFrameworkConnector", "kv_role": "kv_both"}
MULTI = {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [TRANSFER]}}
ALL = Installed(TRANSFER, kvf_sglang=True)
VLLM = ["vllm", "serve", "model"]
SGLANG = ["python3", "-m", "sglang.launch_server", "--model-path", "model"]


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        (VLLM, "vllm"),
        (["/opt/venv/bin/vllm", "serve", "m", "--port", "1"], "vllm"),
        (["python", "-m", "vllm.entrypoints.openai.api_server", "--model", "m"], "vllm"),
        (["python3.11", "-u", "-m", "vllm.entrypoints.cli.main", "serve", "m"], "vllm"),
        (SGLANG, "sglang"),
        (["sglang", "serve", "--model-path", "m"], "sglang"),
        (["vllm", "bench", "latency"], "other"),
        (["python", "script.py", "-m", "sglang.launch_server"], "other"),
        (["python", "-m"], "other"),
        (["vllm"], "other"),
        (["/bin/true"], "other"),
    ],
)
def test_commands_are_told_apart(command: list[str], kind: str) -> None:
    assert kind_of(command) == kind


def test_vllm_gets_what_its_package_recommends() -> None:
    found = connected(VLLM, ALL, HERE)
    assert found.command == [*VLLM, "--kv-transfer-config", json.dumps(TRANSFER)]
    assert found.notes == []


def test_the_module_stands_in_for_a_command_that_cannot_start() -> None:
    found = connected([*VLLM, "--port", "1"], Installed(TRANSFER, vllm=False), HERE)
    _, *rest = found.command
    assert rest[:6] == ["-m", "vllm.entrypoints.openai.api_server", "--model", "model", "--port", "1"]
    assert "distribution" in found.notes[0]


@pytest.mark.parametrize(
    "options",
    [
        ["--kv-transfer-config", json.dumps(TRANSFER)],
        [f"--kv-transfer-config={json.dumps(TRANSFER)}"],
        ["--kv_transfer_config", json.dumps(TRANSFER | {"kv_connector": "KvFrameworkOffloading"})],
        ["--kv-transfer-config", json.dumps(TRANSFER | {"kv_connector_extra_config": {"kvframework.endpoint": HERE}})],
        ["--kv-transfer-config.kv_connector", "KvFrameworkConnector"],
        ["--kv-transfer-config", json.dumps(MULTI)],
        ["--kv-transfer-config", "{no json"],
    ],
)
def test_options_of_the_user_stay(options: list[str]) -> None:
    assert connected([*VLLM, *options], ALL, HERE).command == [*VLLM, *options]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--kv-transfer-config", '{"kv_connector": "LMCacheConnectorV1"}'], "LMCacheConnectorV1"),
        (["--kv-transfer-config.kv_connector=NixlConnector"], "NixlConnector"),
        (
            [
                "--kv-transfer-config",
                json.dumps(TRANSFER | {"kv_connector_extra_config": {"kvframework.endpoint": "ipc:///x"}}),
            ],
            "ipc:///x",
        ),
    ],
)
def test_a_contradiction_names_both_sides(options: list[str], named: str) -> None:
    with pytest.raises(ConfigFieldError) as caught:
        connected([*VLLM, *options], ALL, HERE)
    assert named in str(caught.value)
    assert HERE in str(caught.value) or "kvframework" in str(caught.value)


def test_a_file_that_has_the_option_is_named(tmp_path: Path) -> None:
    file = tmp_path / "vllm.yaml"
    file.write_text("port: 1\nkv-transfer-config: '{}'\n")
    with pytest.raises(ConfigFieldError, match=r"vllm\.yaml has kv-transfer-config"):
        connected([*VLLM, "--config", str(file)], ALL, HERE)
    file.write_text("port: 1\n")
    assert "--kv-transfer-config" in connected([*VLLM, "--config", str(file)], ALL, HERE).command


@pytest.mark.parametrize("command", [VLLM, SGLANG])
def test_an_engine_without_our_package_runs_as_it_is(command: list[str]) -> None:
    found = connected(command, Installed(), HERE)
    assert found.command == command
    assert "pip install" in found.notes[0]


def test_sglang_gets_its_storage_backend() -> None:
    command = connected([*SGLANG, "--page-size=32"], ALL, HERE).command
    given = command[command.index("--hicache-storage-backend-extra-config") + 1]
    assert json.loads(given)["class_name"] == "KvFrameworkStorage"
    assert command[command.index("--hicache-storage-backend") + 1] == "dynamic"
    assert "--page-size" not in command
    assert "--enable-hierarchical-cache" in command


@pytest.mark.parametrize(
    "options",
    [
        ["--hicache-storage-backend", "mooncake"],
        ["--hicache-storage-backend-extra-config", '{"module_path": "other"}'],
        [
            "--hicache-storage-backend-extra-config",
            '{"module_path": "kvf_sglang.storage", "kvframework.endpoint": "ipc:///x"}',
        ],
    ],
)
def test_another_storage_of_sglang_is_a_contradiction(options: list[str]) -> None:
    with pytest.raises(ConfigFieldError, match="contradicts"):
        connected([*SGLANG, *options], ALL, HERE)


def test_a_script_connects_itself_and_anything_else_is_named() -> None:
    assert connected(["python", "chat.py"], ALL, HERE) == (["python", "chat.py"], [])
    assert "is not a known command of vLLM or SGLang, so it gets" in connected(["llama-server"], ALL, HERE).notes[0]


@given(st.lists(st.text(max_size=30), min_size=1, max_size=8))
def test_no_command_is_too_strange(command: list[str]) -> None:
    try:
        found = connected(command, ALL, HERE)
    except ConfigFieldError:
        return
    assert found.command[: len(command)] == command


def test_the_interpreter_of_a_script_is_in_its_first_line(tmp_path: Path) -> None:
    script = tmp_path / "vllm"
    script.write_text(f"#!{sys.executable}\n")
    script.chmod(0o755)
    assert interpreter_of([str(script)]) == sys.executable
    assert interpreter_of([sys.executable, "-m", "x"]) == sys.executable
    assert interpreter_of(["/no/such/file"]) == sys.executable
    script.write_text("#!/bin/sh\n")
    assert interpreter_of([str(script)]) == sys.executable


def test_the_interpreter_says_what_it_has() -> None:
    pytest.importorskip("kvf_vllm")
    found = examined([sys.executable, "-m", "vllm.entrypoints.openai.api_server"])
    assert found.transfer["kv_load_failure_policy"] == "recompute"
    assert examined(["/bin/true"]).kvf_sglang == found.kvf_sglang


def written(path: Path, text: bytes, most: int) -> None:
    source, end = os.pipe()
    feeding = threading.Thread(target=lambda: (os.write(end, text), os.close(end)))
    feeding.start()
    try:
        write(source, path, most)
    finally:
        feeding.join()
        os.close(source)


def test_it_turns_at_the_end_of_a_line(tmp_path: Path) -> None:
    path = tmp_path / "s.log"
    lines = [b"line %d\n" % number for number in range(200)]
    for line in lines:
        written(path, line, 500)
    assert path.stat().st_size <= 500 + 10
    assert older(path).stat().st_size <= 500 + 20
    kept = (older(path).read_bytes() + path.read_bytes()).splitlines(keepends=True)
    assert kept == lines[-len(kept) :]
    assert last_lines(path, 3) == ["line 197", "line 198", "line 199"]


def test_a_log_that_cannot_turn_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "s.log"
    (older(path) / "in the way").mkdir(parents=True)
    lines = [b"line %d\n" % number for number in range(9)]
    source, end = os.pipe()
    reading = threading.Thread(target=write, args=(source, path, 10))
    reading.start()
    for count, line in enumerate(lines, 1):
        os.write(end, line)
        wait_until(lambda count=count: path.exists() and path.read_bytes() == b"".join(lines[:count]), what="a line")
    os.close(end)
    reading.join()
    os.close(source)


def test_a_log_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        last_lines(tmp_path / "s.log", 3)


def test_it_is_followed_over_a_turn(tmp_path: Path) -> None:
    path = tmp_path / "s.log"
    path.write_text("old\n")
    got: list[str] = []
    text = followed(path, 0.01)
    reading = threading.Thread(target=lambda: got.extend(iter(lambda: next(text), "newer\n")), daemon=True)
    reading.start()
    wait_until(lambda: appended(path, "new\n") and got, what="the text that was appended")
    os.replace(path, older(path))
    path.write_text("newer\n")
    reading.join(60)
    assert not reading.is_alive()
    text.close()
    assert set("".join(got).splitlines()) == {"new"}


def appended(path: Path, text: str) -> bool:
    with path.open("a") as file:
        return bool(file.write(text))
