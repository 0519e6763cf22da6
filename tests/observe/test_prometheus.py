"""A real Prometheus scrapes a real server through `kvframework observe`, with TLS and a token, and has its rules."""

from __future__ import annotations

import itertools
import json
import shutil
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from kvframework.wire import messages as m
from tests.observe.promtool import ALERTS, RULES
from tests.support.certificates import make_certificate
from tests.support.observe_process import SLOW_S, ObserveProcess, get
from tests.support.ports import free_port
from tests.support.server_process import ServerProcess
from tests.support.waiting import wait_until
from tests.support.wire_client import key_for

pytestmark = [
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs Prometheus (Debian: prometheus)"),
    pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl"),
]

CONFIG = """
global: {{scrape_interval: 1s, scrape_timeout: 1s, evaluation_interval: 1s}}
rule_files: [{rules}]
scrape_configs:
  - job_name: kvframework
    scheme: https
    authorization: {{credentials_file: {token}}}
    tls_config: {{ca_file: {certificate}}}
    static_configs: [{{targets: ["{target}"]}}]
"""


class Prometheus:
    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}"

    def ask(self, path: str) -> Any:
        return json.loads(get(self._url, f"/api/v1/{path}").text)["data"]

    def is_ready(self) -> bool:
        try:
            return get(self._url, "/-/ready").status == 200
        except OSError:
            return False

    def value(self, query: str) -> float | None:
        result = self.ask(f"query?query={quote(query)}")["result"]
        return float(result[0]["value"][1]) if result else None


@contextmanager
def prometheus(config: str, folder: Path) -> Iterator[Prometheus]:
    file, port = folder / "prometheus.yml", free_port()
    file.write_text(config)
    command = ["prometheus", f"--config.file={file}", f"--storage.tsdb.path={folder / 'data'}"]
    command += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"]
    with (folder / "log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            running = Prometheus(port)
            wait_until(running.is_ready, SLOW_S, "Prometheus")
            yield running
        finally:
            process.terminate()
            process.wait(SLOW_S)


def test_it_scrapes_what_a_server_counts(tmp_path: Path) -> None:
    certificate = make_certificate(tmp_path)
    token = tmp_path / "token"
    token.write_text("s3cret\n")
    tls_files = ("--tls-cert", str(certificate.certificate), "--tls-key", str(certificate.key))
    options = (*tls_files, "--token-file", str(token))
    with ServerProcess() as server, ObserveProcess(server.endpoint, *options) as observe, server.client() as client:
        target = observe.url.removeprefix("https://")
        assert target != observe.url
        tls = ssl.create_default_context(cafile=certificate.certificate)
        assert get(observe.url, "/metrics", tls=tls).status == 401
        wait_until(lambda: get(observe.url, "/livez", tls=tls).text == "ok\n", SLOW_S, "liveness")
        config = CONFIG.format(rules=RULES, token=token, certificate=certificate.certificate, target=target)
        with prometheus(config, tmp_path) as running:
            wait_until(lambda: running.value("kvframework_up") == 1, SLOW_S, "the first scrape")
            assert running.value("kvframework_lookups_total") == 0
            key = key_for(client.register(), [1] * 512)
            client.store(key, b"x")
            assert client.lookup(key).hit_tokens == 512
            wait_until(lambda: running.value("kvframework_lookups_total") == 1, SLOW_S, "the lookup")
            hit = 'sum(kvframework_lookup_tokens_total{found="l1"})'
            wait_until(lambda: running.value(hit) == 512, SLOW_S, "its tokens")
            (active,) = running.ask("targets")["activeTargets"]
            assert (active["health"], active["lastError"]) == ("up", "")
            rules = [rule for group in running.ask("rules")["groups"] for rule in group["rules"]]
            assert {rule["name"] for rule in rules if rule["type"] == "alerting"} == {alert.name for alert in ALERTS}
            assert {rule["health"] for rule in rules} <= {"ok", "unknown"}
            server.kill9()
            wait_until(lambda: running.value("kvframework_up") == 0, SLOW_S, "the absence")
            wait_until(lambda: running.value("kvframework_lookups_total") is None, SLOW_S, "the end of the series")
            token.write_text("another\n")
            wait_until(lambda: running.ask("targets")["activeTargets"][0]["health"] == "up", SLOW_S, "the new token")


FLEET = """
global: {{scrape_interval: 1s, scrape_timeout: 1s, evaluation_interval: 1s}}
rule_files: [{rules}]
scrape_configs:
  - job_name: kvframework
    static_configs: [{{targets: {targets}, labels: {{cluster: east}}}}]
"""
# A fleet without trouble has no series of these.
EMPTY = ("ALERTS", "kvframework_tier_up")


@pytest.mark.parametrize("bad", ["", "sum by (", "rate(kvframework_lookups_total)"])
def test_promtool_takes_the_rules_and_refuses_bad_ones(tmp_path: Path, bad: str) -> None:
    file = tmp_path / "rules.yml"
    first = "- record: instance:kvframework_lookup_tokens:rate5m\n        expr: "
    head, found, rest = RULES.read_text().partition(first)
    assert found, "the file has recording rules"
    file.write_text(head + found + (f"{json.dumps(bad)}\n" + rest.partition("\n")[2] if bad else rest))
    done = subprocess.run(["promtool", "check", "rules", "--lint=all", "--lint-fatal", file], capture_output=True)
    assert (done.returncode == 0) == (not bad), done.stderr


def test_the_fleets_dashboard_shows_three_servers_under_load(tmp_path: Path) -> None:
    dashboard = json.loads((RULES.parents[1] / "grafana" / "kvframework-fleet.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    with ExitStack() as stack:
        disks = [("l2.0.use=filesystem", f"l2.0.path={tmp_path / str(number)}") for number in range(3)]
        servers = [stack.enter_context(ServerProcess(*disk, capacity="4MiB")) for disk in disks]
        observed = [stack.enter_context(ObserveProcess(server.endpoint)) for server in servers]
        clients = [stack.enter_context(server.client()) for server in servers]
        records = [client.register() for client in clients]
        targets = json.dumps([each.url.removeprefix("http://") for each in observed])
        running = stack.enter_context(prometheus(FLEET.format(rules=RULES, targets=targets), tmp_path))
        missing = list(queries)
        numbers = itertools.count(1)

        def seen() -> bool:
            """Load every server once more, and ask again for what had no series."""
            for client, record in zip(clients, records, strict=True):
                key = key_for(record, [next(numbers)] * 256)
                client.store(key, b"x")
                client.hit(key)
                client.retrieve(key)
                client.call("CLEAR", m.Clear())
                client.hit(key)  # in the tier, sooner or later
            missing[:] = [query for query in missing if running.value(filled(query)) is None]
            return all(any(part in query for part in EMPTY) for query in missing)

        wait_until(seen, SLOW_S, f"series for {missing}")
        assert running.value(filled(queries[0])) == 3
        lowest = filled(next(each for each in queries if "bottomk" in each))
        rows = partial(running.ask, f"query?query={quote(lowest)}")
        wait_until(lambda: seen() and len(rows()["result"]) == 3, SLOW_S, "a row for each server")


def filled(query: str) -> str:
    for variable in ("instance", "cluster", "model"):
        query = query.replace(f"${variable}", ".*")
    return query.replace("$__rate_interval", "1m")
