"""systemd itself as the keeper: a user manager in namespaces of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.core.keeper.held import ROOT, SERVER
from tests.support.processes import ran

SYSTEMD = "/lib/systemd/systemd"
UNSHARE = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
UNIT = """
[Service]
Type=notify
ExecStart={python} {program} {root} {folder}
FileDescriptorStoreMax=8
Restart=always
RestartSec=0
"""
# A manager refuses to run where no systemd has booted; its /run is its own.
SCRIPT = """
mount --make-rprivate / && mount -t tmpfs none /run/systemd && mkdir /run/systemd/system || exit 77
"$1" --user --log-target=null </dev/null &
for _ in $(seq 600); do test -S "$XDG_RUNTIME_DIR/systemd/private" && break; sleep 0.1; done
test -S "$XDG_RUNTIME_DIR/systemd/private" || exit 77
pid() { systemctl --user show kept.service -p MainPID --value; }
ready() { for _ in $(seq 600); do test "$(grep -c ready "$1" 2>/dev/null)" -ge "$2" && return; sleep 0.1; done; }
set -e
systemctl --user start kept.service
ready "$2" 1
kill -9 "$(pid)"
ready "$2" 2
systemctl --user restart kept.service
ready "$2" 3
systemctl --user daemon-reexec
kill -9 "$(pid)"
ready "$2" 4
systemctl --user show kept.service -p NFileDescriptorStore --value
"""


def test_systemd_keeps_what_a_server_stores() -> None:
    if os.getuid() != 0 or not shutil.which("unshare") or not Path(SYSTEMD).exists():
        pytest.skip("needs root, unshare and systemd")
    # Short, for the manager's own sockets.
    with tempfile.TemporaryDirectory(prefix="kvf-") as made:
        folder = Path(made)
        units = folder / "config" / "systemd" / "user"
        units.mkdir(parents=True)
        (folder / "run").mkdir(mode=0o700)
        (folder / "program.py").write_text(SERVER)
        unit = UNIT.format(python=sys.executable, program=folder / "program.py", root=ROOT, folder=folder)
        (units / "kept.service").write_text(unit)
        environ = {name: value for name, value in os.environ.items() if not name.startswith("DBUS")}
        done = ran(
            *(*UNSHARE, "bash", "-c", SCRIPT, "bash", SYSTEMD, str(folder / "report")),
            code=None,
            env={**environ, "XDG_RUNTIME_DIR": str(folder / "run"), "XDG_CONFIG_HOME": str(folder / "config")},
            stdin=subprocess.DEVNULL,
            timeout=280,
        )
        if done.returncode == 77:
            pytest.skip("no user manager of systemd runs here")
        assert done.returncode == 0, done.stderr
        reports = [json.loads(line) for line in (folder / "report").read_text().splitlines()]
    ready = [line for line in reports if line["event"] == "ready"]
    assert ready[0]["found"] == {}
    (token,) = {token for line in ready[1:] for token in line["found"].values()}
    assert "broken" not in token
    assert [set(line["found"]) for line in ready[1:]] == [{"kvf-arena", "kvf-journal"}] * 3
    assert all(line["environ"] == [] for line in ready)
    assert done.stdout.strip() == "2"
