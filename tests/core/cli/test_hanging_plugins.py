"""Plugins whose calls never return: `config check` and `serve` end with the plugin's name, and a server that serves
refuses the new configuration and serves on."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.core.cli.command import environment, run
from tests.core.cli.test_config_show import FileServer
from tests.core.registry.fake_distributions import install
from tests.support.processes import ran
from tests.support.waiting import wait_until

# The command, with bounds that a test can wait for.
QUICK = "import kvframework.bounded_calls as each; each.BOUND_S = 2.0; from kvframework.cli.main import main; main()"
HANGS_IN = {
    "import": "codec.stuck (acme_stuck) of acme 1.0: the import has not returned within 2 s",
    "hook": "codec.stuck (acme_stuck) of acme 1.0: kvf_codecs has not returned within 2 s",
    "probe": "codec.stuck (acme_stuck) of acme 1.0: its probe has not returned within 2 s",
    "check": "codec.stuck (acme 1.0): check has not returned within 2 s",
}
TOML = """
transport = []
layout = []
[l1]
use = "pinned"
capacity = "16MiB"
[server]
endpoint = "ipc://{folder}/kvf.sock"
[codecs]
allow = ["stuck"]
"""


def stuck_codec(site: Path, hangs_in: str) -> None:
    source = f"""
        import threading
        from kvframework.api.codec import CodecProvider, hookimpl
        def hang(*_):
            threading.Event().wait()
        if {hangs_in == "import"}:
            hang()
        @hookimpl
        def kvf_codecs():
            if {hangs_in == "hook"}:
                hang()
            more = dict(probe=hang) if {hangs_in == "probe"} else dict(check=hang) if {hangs_in == "check"} else {{}}
            return [CodecProvider(name="stuck", summary="", create=print, **more)]
    """
    install(site, "acme", {"codec.stuck": "acme_stuck"}, {"acme_stuck": source})


@pytest.mark.parametrize("command", ["config check", "serve --config", "doctor --config"])
@pytest.mark.parametrize("step", ["its probe", "check"])
def test_a_plugin_neither_ends_the_process_nor_prints_to_its_output(
    site: Path, toml: Path, command: str, step: str
) -> None:
    stuck_codec(site, step.removeprefix("its "))
    file = site / "acme_stuck.py"
    file.write_text(file.read_text().replace("threading.Event().wait()", "print('a word'); import os; os._exit(0)"))
    done = quick(site, *command.split(), str(toml))
    assert done.returncode in (1, 2), done
    assert "a word" not in done.stdout
    assert re.search(rf"codec.stuck .*acme 1.0.*: {step} called\s+os._exit", done.stdout + done.stderr)


def stuck_hasher(site: Path) -> None:
    source = """
        import threading
        from kvframework.api.hasher import HasherProvider, hookimpl
        @hookimpl
        def kvf_key_hashers():
            return [HasherProvider(name="stuck", summary="", create=lambda options: threading.Event().wait())]
    """
    install(site, "acme", {"hasher.stuck": "acme_stuck"}, {"acme_stuck": source})


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    file = tmp_path / "kvf.toml"
    file.write_text(TOML.format(folder=tmp_path))
    return file


def quick(site: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return ran(sys.executable, "-c", QUICK, *arguments, code=None, env=environment(site), timeout=50)


@pytest.mark.parametrize("command", ["config check", "serve --config", "serve --log-format json --config"])
@pytest.mark.parametrize("hangs_in", HANGS_IN)
def test_a_call_that_does_not_return_ends_the_command_with_the_plugins_name(
    site: Path, toml: Path, command: str, hangs_in: str
) -> None:
    stuck_codec(site, hangs_in)
    done = quick(site, *command.split(), str(toml))
    assert (done.returncode, done.stdout) == (2, "")
    assert f"[plugin.broken] {toml}: [codecs] allow: {HANGS_IN[hangs_in]}" in done.stderr
    assert "report the error to the plugin's author, or choose another plugin" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_create_that_does_not_return_ends_the_start_and_the_check_says_that_it_cannot_know(
    site: Path, toml: Path
) -> None:
    stuck_hasher(site)
    toml.write_text(toml.read_text().replace('allow = ["stuck"]', "") + '[hasher]\nuse = "stuck"\n')
    checked = quick(site, "config", "check", str(toml))
    assert (checked.returncode, checked.stderr) == (0, "")
    assert checked.stdout.splitlines()[1:] == [
        "not checked before the server starts: `create` of hasher.stuck (acme 1.0)"
    ]
    served = quick(site, "serve", "--config", str(toml))
    assert (served.returncode, served.stdout) == (2, "")
    assert f"{toml}: [hasher]: hasher.stuck (acme 1.0): create has not returned within 2 s" in served.stderr


def test_errors_before_the_call_that_does_not_return_are_told(site: Path, toml: Path) -> None:
    stuck_codec(site, "probe")
    toml.write_text(toml.read_text() + '[hasher]\nuse = "sha265"\n')
    done = quick(site, "config", "check", str(toml))
    assert done.returncode == 2
    assert [line.split()[1] for line in done.stderr.splitlines() if line.startswith("error: ")] == [
        "[plugin.not_found]",
        "[plugin.broken]",
    ]


def test_a_server_that_serves_refuses_such_a_plugin_and_serves_on(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stuck_codec(site, "probe")
    monkeypatch.setenv("PYTHONPATH", str(site))
    server = FileServer(program=("-c", QUICK))
    monkeypatch.setenv("KVFRAMEWORK_CONFIG", str(server.file))
    with server, server.client() as client:
        for _ in range(2):
            server.write(log='[codecs]\nallow = ["stuck"]\n')
            server.hang_up()
            said = server.log.count("its probe has not returned")
            longest = 0.0
            until = time.monotonic() + 60.0
            while server.log.count("its probe has not returned") == said:
                begun = time.monotonic()
                assert client.status()["server"]["pid"] == server.pid
                longest = max(longest, time.monotonic() - begun)
                assert begun < until
            assert longest < 2.0, "the server stood still meanwhile"
        assert "SIGHUP: nothing has changed, because the configuration is wrong: [plugin.broken]" in server.log
        at = ("--set", f"server.endpoint={server.endpoint}")
        done = run("config", "apply", str(server.file), *at)
        assert done.returncode == 2
        assert "its probe has not returned within 2 s" in done.stderr
        server.write(log='[log]\nlevel = "debug"\n')
        server.hang_up()
        wait_until(lambda: 'configuration: log.level = "debug"' in server.log)
        assert server.stop() == 0, "a call that hangs keeps no process alive"
