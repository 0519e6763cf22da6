"""The listener `usage` passes the kit of its kind, and sums up what a real server's tenants have, by day."""

from __future__ import annotations

import csv
import io
import sys
import time
from pathlib import Path

import pytest

from kvf_dev.testing import ListenerConformance
from kvf_quota.usage import COLUMNS, UsageListener, UsageOptions, Use, read_days, rows_of
from kvframework.api.listener import ListenerContext
from kvframework.errors import ConfigFieldError
from tests.quota.test_redis import CHUNK, SALT, SETTINGS, prompt
from tests.support.processes import ran
from tests.support.server_process import ServerProcess
from tests.support.waiting import wait_until
from tests.support.wire_client import key_for


class TestUsage(ListenerConformance):
    @pytest.fixture
    def make_listener(self, tmp_path: Path) -> object:
        def make(context: ListenerContext) -> UsageListener:
            return UsageListener(UsageOptions(path=str(tmp_path / "usage")), context)

        return make


def test_gb_hours_and_hits_of_each_tenant_go_on_after_a_restart(tmp_path: Path) -> None:
    file = tmp_path / "node.usage"
    table = ("listener.0.use=usage", f"listener.0.path={file}", "listener.0.every_s=1.0")
    disk = ("l2.0.use=filesystem", f"l2.0.path={tmp_path / 'l2'}", "l2.0.capacity=1GiB")

    def row() -> Use:
        days = read_days(file)
        return days.get(time.strftime("%Y-%m-%d", time.gmtime()), {}).get("customer", Use())

    def grows(name: str) -> None:
        before = getattr(row(), name)
        wait_until(lambda: getattr(row(), name) > before, 60, name)

    with ServerProcess(*SETTINGS, *table, *disk) as server:
        for _ in range(2):
            with server.client() as client:
                key = key_for(client.register(), prompt(1, 4), cache_salt=SALT)
                client.store(key, b"x")
                wait_until(lambda: client.status()["l2"][0]["write_pending"] == 0, 60, "the writes")
                client.settled(client.lookup(key))
                grows("l2_gb_hours")
                grows("l1_gb_hours")
            server.stop()
            server.start()
        grows("l2_gb_hours")  # also of a server that has written nothing
    assert (row().lookups, row().hit_tokens) == (2, 8 * CHUNK)
    printed = ran(
        sys.executable, "-m", "kvframework.cli.main", "tenants", "usage", "--csv", str(file), str(file)
    ).stdout
    (head, *rows) = csv.reader(io.StringIO(printed))
    assert head == list(COLUMNS)
    ((_, _, l1, l2, lookups, tokens, saved),) = [each for each in rows if each[1] == "customer"]
    assert (lookups, tokens, float(saved)) == ("4", str(16 * CHUNK), 0.0)
    # Of 128 KiB for some seconds, in L1 twice as two servers' files.
    assert float(l1) == pytest.approx(2 * row().l1_gb_hours, abs=1e-9)
    assert float(l2) == pytest.approx(row().l2_gb_hours, abs=1e-9)
    assert row().l1_gb_hours < 600 * (4 << 15) / 3600e9


@pytest.mark.parametrize("content", ["[]", "{", '{"2026-11-30": {"a": {"lookups": "x"}}}'])
def test_a_file_of_something_else_is_named(tmp_path: Path, content: str) -> None:
    file = tmp_path / "other.json"
    file.write_text(content)
    with pytest.raises(ConfigFieldError, match="is not a file of the listener usage"):
        rows_of([file])
