"""The log of a server: for people, and as one JSON object a line."""

from __future__ import annotations

import json
import logging
import re
import sys
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from kvframework.config.load import load_config
from kvframework.config.schema import LogConfig
from kvframework.errors import ConfigFieldError
from kvframework.logs.process_log import JsonFormatter
from tests.core.cli.command import run_process
from tests.support.processes import ran
from tests.support.server_process import ServerProcess

HUMAN = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} INFO kvframework.server: serving at ipc://")


def entries(log: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in log.splitlines()]


def test_a_server_logs_json_from_start_to_end() -> None:
    with ServerProcess('log={format="json", level="info"}') as server:
        assert server.stop() == 0
        found = entries(server.log)
        said = {entry["message"] for entry in found}
        assert {f"serving at {server.endpoint}", "stopped"} <= said
        assert all(set(entry) == {"time", "level", "logger", "message"} for entry in found)
        assert {entry["level"] for entry in found} == {"info"}
        for entry in found:
            assert datetime.fromisoformat(entry["time"]).utcoffset() == timedelta(0)


def test_a_server_logs_for_people_by_default() -> None:
    with ServerProcess() as server:
        server.stop()
        assert any(HUMAN.match(line) for line in server.log.splitlines())


def test_a_server_that_never_served_does_not_log_an_end() -> None:
    with ServerProcess() as server:
        second = run_process("serve", "--set", f"server.endpoint={server.endpoint}", "--set", "l1.capacity=1MiB")
        assert second.returncode == 2
        assert "config.endpoint" in second.stderr
        assert str(server.pid) in second.stderr
        assert "stopped" not in second.stderr


def test_the_level_bounds_what_is_logged() -> None:
    with ServerProcess("log.level=warning") as server:
        server.stop()
        assert server.log == ""


def test_the_command_line_goes_before_the_configuration(tmp_path: Path) -> None:
    toml = tmp_path / "kvf.toml"
    toml.write_text('[log]\nlevel = "error"\nformat = "human"\n[l1]\ncapacity = "1TiB"\n')
    done = run_process("serve", "--config", str(toml), "--log-format", "json", "--log-level", "debug")
    assert (done.returncode, done.stdout) == (2, "")
    (entry,) = entries(done.stderr)
    assert entry["level"] == "critical"
    assert "[storage.arena]" in entry["message"]


def test_warnings_and_threads_are_logged_too() -> None:
    script = (
        "import logging, threading, warnings\n"
        "from kvframework.logs.process_log import configure_logging\n"
        "configure_logging('info', 'json')\n"
        "warnings.warn('careful')\n"
        "def fail(): raise ValueError('in a thread')\n"
        "thread = threading.Thread(target=fail, name='worker')\n"
        "thread.start(); thread.join()\n"
    )
    done = ran(sys.executable, "-c", script)
    warning, failure = entries(done.stderr)
    assert (warning["level"], warning["logger"]) == ("warning", "py.warnings")
    assert "careful" in warning["message"]
    assert failure["level"] == "error"
    assert failure["message"] == "worker ended with an error"
    assert failure["exception"].endswith("ValueError: in a thread")


def test_whatever_is_said_stays_on_one_line() -> None:
    record = logging.LogRecord("a.b", logging.WARNING, "", 1, "%s", ("x\ny\u2028z\ud800",), None)
    line = JsonFormatter().format(record)
    assert line.splitlines() == [line]
    assert json.loads(line)["message"] == "x\ny\u2028z\ud800"
    try:
        raise ValueError("deep")
    except ValueError:
        record.exc_info = sys.exc_info()
    line = JsonFormatter().format(record)
    assert line.splitlines() == [line]
    exception = json.loads(line)["exception"]
    assert exception.startswith("Traceback")
    assert exception.endswith("ValueError: deep")


def test_the_table_is_checked() -> None:
    assert load_config(environ={}).log == LogConfig("info", "human")
    assert load_config(overrides=["log.format=json"], environ={}).log == LogConfig("info", "json")
    for override, available in (("log.level=loud", "debug, info, warning, error"), ("log.format=xml", "human, json")):
        with pytest.raises(ConfigFieldError) as caught:
            load_config(overrides=[override], environ={})
        assert set(caught.value.available.split(", ")) == set(available.split(", "))
        assert "[log]" in caught.value.where
