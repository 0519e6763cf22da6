"""The unit under systemd itself, a user manager in separate namespaces: L1 is kept over kills and restarts, and after a
stop, which drops it, the tier has all."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.core.keeper.held import ROOT
from tests.support.processes import ran

pytest.importorskip("kvf_filesystem")
SYSTEMD = "/lib/systemd/systemd"
UNSHARE = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
# Of the unit, what does not need the system's manager.
KEPT = "Type|ExecStart|ExecReload|ExecStop|FileDescriptorStore.*|KillMode|TimeoutStopSec|Restart|RestartSec"
CONFIG = """
[server]
endpoint = "ipc://{folder}/s.sock"
[l1]
use = "pinned"
capacity = "64MiB"
high_watermark = 0.9
low_watermark = 0.8
[[l2]]
use = "filesystem"
path = "{folder}/l2"
capacity = "64MiB"
write_policy = "write_back"
"""
# What an engine finds, and what the server has from an earlier one.
CLIENT = """
import json, sys
from tests.support.wire_client import WireClient, key_for
with WireClient(sys.argv[1]) as client:
    key = key_for(client.register(), range(1024))
    if "fill" in sys.argv:
        client.store(key, b"x")
    print(json.dumps([client.hit(key), client.status()["l1"]["recovered"]["objects"]]))
"""
# A manager refuses to run where no systemd has booted; its /run is its own.
SCRIPT = """
mount --make-rprivate / && mount -t tmpfs none /run/systemd && mkdir /run/systemd/system || exit 77
"$1" --user --log-target=null </dev/null &
for _ in $(seq 600); do test -S "$XDG_RUNTIME_DIR/systemd/private" && break; sleep 0.1; done
test -S "$XDG_RUNTIME_DIR/systemd/private" || exit 77
pid() { systemctl --user show kvf.service -p MainPID --value; }
killed() { old=$(pid); kill -9 "$old"; for _ in $(seq 600); do n=$(pid)
    test "$n" != "$old" -a "$n" != 0 && systemctl --user is-active -q kvf.service && return; sleep 0.1; done; }
set -e
systemctl --user start kvf.service
"$2" -c "$3" "$4" fill
killed
"$2" -c "$3" "$4"
systemctl --user reload kvf.service
systemctl --user daemon-reexec
killed
"$2" -c "$3" "$4"
systemctl --user show kvf.service -p NFileDescriptorStore --value
systemctl --user restart kvf.service
"$2" -c "$3" "$4"
systemctl --user stop kvf.service
systemctl --user clean --what=fdstore kvf.service 2>/dev/null || true
systemctl --user start kvf.service
"$2" -c "$3" "$4"
systemctl --user stop kvf.service
"""


def test_systemd_keeps_l1_and_a_stop_drains_it() -> None:
    if os.getuid() != 0 or not shutil.which("unshare") or not Path(SYSTEMD).exists():
        pytest.skip("needs root, unshare and systemd")
    # Short, for the manager's own sockets.
    with tempfile.TemporaryDirectory(prefix="kvf-") as made:
        folder = Path(made)
        units = folder / "config" / "systemd" / "user"
        units.mkdir(parents=True)
        (folder / "run").mkdir(mode=0o700)
        config, command = folder / "kvf.toml", f"{sys.executable} -m kvframework.cli.main"
        config.write_text(CONFIG.format(folder=folder))
        unit = (ROOT / "deploy/systemd/kvframework.service").read_text().replace("/etc/kvframework/kvf.toml", made)
        unit = unit.replace(made, str(config)).replace("/opt/kvframework/bin/kvframework", command)
        lines = re.findall(rf"^(?:{KEPT})=.*$", unit, re.MULTILINE)
        (units / "kvf.service").write_text("\n".join(["[Service]", f"WorkingDirectory={ROOT}", *lines, ""]))
        environ = {name: value for name, value in os.environ.items() if not name.startswith("DBUS")}
        done = ran(
            *(*UNSHARE, "bash", "-c", SCRIPT, "bash", SYSTEMD, sys.executable, CLIENT, f"ipc://{folder}/s.sock"),
            code=None,
            cwd=ROOT,
            env={**environ, "XDG_RUNTIME_DIR": str(folder / "run"), "XDG_CONFIG_HOME": str(folder / "config")},
            stdin=subprocess.DEVNULL,
            timeout=280,
        )
    if done.returncode == 77:
        pytest.skip("no user manager of systemd runs here")
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert found.pop(3) == 2
    assert found == [[1024, kept] for kept in (0, 4, 4, 4, 0)]
