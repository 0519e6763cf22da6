"""Bad orders, and too many: bounded and typed; the token; the document of the paths; and what the log has of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.control.control_process import OBJECT, ControlProcess, Engine, prompt
from tests.core.cli.command import run
from tests.support.server_process import ServerProcess
from tests.support.waiting import wait_until

# 4 MiB.
L1_CHUNKS = (4 << 20) // OBJECT
TEN_YEARS = 10 * 365 * 86400


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess(capacity="4MiB") as server:
        yield server


@pytest.fixture(scope="module")
def control(server: ServerProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlProcess]:
    with Engine(server) as client, ControlProcess(server, tmp_path_factory.mktemp("control")) as control:
        client.save(prompt(1, 4))
        yield control


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/v1/pin", {"tokens": prompt(1, 4), "seconds": TEN_YEARS}, "<= 604800"),
        ("/v1/pin", {"tokens": prompt(1, 4), "seconds": -1}, "> 0"),
        ("/v1/pin", {"tokens": prompt(1, 4)}, "missing required field `seconds`"),
        ("/v1/pin", {"tokens": prompt(1, 4), "seconds": float("nan")}, "JSON is malformed"),
        ("/v1/prefetch", {}, "the order names no KV"),
        ("/v1/prefetch", {"tokens": [1, 2, 3]}, "no whole chunk"),
        ("/v1/prefetch", {"tokens": [-1]}, ">= 0"),
        ("/v1/prefetch", {"tokens": [1 << 32]}, "<= 4294967295"),
        ("/v1/prefetch", {"tokens": [1], "digests": ["0" * 64]}, "tokens and digests"),
        ("/v1/prefetch", {"digests": ["zz"]}, "regex"),
        ("/v1/prefetch", {"tokens": prompt(1, 4), "model": "unknown"}, "no engine of this model"),
        ("/v1/prefetch", {"tokens": prompt(1, 4), "namespace": "0" * 32}, "no engine of this model or namespace"),
        ("/v1/prefetch", {"tokens": prompt(1, 4), "other": 1}, "unknown field `other`"),
        ("/v1/prefetch", {"conversation": "unknown"}, "a known conversation"),
        ("/v1/prefetch", {"conversation": "x" * 300}, "length <= 256"),
        ("/v1/prefetch", b"{", "truncated"),
        ("/v1/prefetch", b"[" * 100_000, "Expected `object`"),
        ("/v1/prefetch", b"\xff", "malformed"),
        ("/v1/forget", {}, "the request names no KV to delete"),
        ("/v1/forget", {"tenant": "acme"}, "the tenant 'acme' is unknown"),
        ("/v1/conversations/unknown/end", {}, "no order has named this conversation"),
        ("/v1/conversations/c/turn", {"tokens": prompt(1, 4), "seconds": 7200}, "<= 3600"),
        ("/v1/conversations/" + "x" * 300 + "/turn", {"tokens": prompt(1, 4), "seconds": 1}, "length <= 256"),
    ],
)
def test_bad_orders_are_named(control: ControlProcess, path: str, body: object, words: str) -> None:
    status, answer = control.ask("POST", path, body)
    assert (status, words in answer["error"]) == (400, True), answer


def test_other_paths_and_methods(control: ControlProcess) -> None:
    assert control.ask("GET", "/v1/pin")[0] == 405
    assert control.ask("GET", "/v1")[0] == 404
    assert control.ask("DELETE", "/v1/directives/unknown")[0] == 400
    assert control.ask("POST", "/v1/pin", b" " * ((3 << 20) + 1))[0] == 413
    assert control.ask("GET", "/livez", token="") == (200, "ok\n")


@pytest.mark.parametrize("token", ["", "the token of order", "the token of orders "[::-1], "x" * 8000])
def test_without_the_token_nothing_is_learned(control: ControlProcess, token: str) -> None:
    asked = [("POST", "/v1/pin"), ("GET", "/v1/directives"), ("GET", "/openapi.json"), ("GET", "/nowhere")]
    assert {control.ask(method, path, token=token) for method, path in asked} == {(401, "Unauthorized\n")}


def test_pins_and_loads_are_bounded_by_parts_of_l1(control: ControlProcess) -> None:
    """A quarter of L1 is for one tenant, and half for all."""
    quarter = L1_CHUNKS // 4
    status, answer = control.ask("POST", "/v1/prefetch", {"tokens": prompt(1, quarter + 1)})
    assert (status, "25% of L1" in answer["error"]) == (429, True)
    held = []
    for number, tenant in ((1, "a"), (2, "b")):
        held.append(control.order("/v1/pin", tokens=prompt(number, quarter), seconds=60, tenant=tenant)["id"])
        body = {"tokens": prompt(9, 1), "seconds": 60, "tenant": tenant}
        status, answer = control.ask("POST", "/v1/pin", body)
        assert (status, "pinned for a tenant" in answer["error"]) == (429, True)
    status, answer = control.ask("POST", "/v1/pin", {"tokens": prompt(9, 1), "seconds": 60, "tenant": "c"})
    assert (status, "50% of L1" in answer["error"]) == (429, True)
    # The same run again takes its own place.
    held.append(control.order("/v1/pin", tokens=prompt(1, quarter), seconds=60, tenant="a")["id"])
    for name in held[1:]:
        assert control.ask("DELETE", f"/v1/directives/{name}")[0] == 200


def test_its_metrics_count_orders_and_what_was_refused(control: ControlProcess) -> None:
    def metrics() -> dict[str, float]:
        status, text = control.ask("GET", "/metrics")
        assert status == 200
        rows = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        return {name.removeprefix("kvframework_control_"): float(value) for name, value in rows}

    before = metrics()
    name = control.order("/v1/pin", tokens=prompt(1, 4), seconds=60)["id"]
    assert control.ask("POST", "/v1/prefetch", {"tokens": prompt(1, L1_CHUNKS)})[0] == 429
    after = metrics()
    assert after["pins"] - before["pins"] == 1
    assert after["pinned_bytes"] - before["pinned_bytes"] == 4 * OBJECT
    assert after["refused_orders_total"] - before["refused_orders_total"] == 1
    assert after['orders_total{do="pin"}'] - before.get('orders_total{do="pin"}', 0) == 1
    assert control.ask("DELETE", f"/v1/directives/{name}")[0] == 200
    assert metrics()["pins"] == before["pins"]


def test_a_storm_of_pins_meets_a_bound(control: ControlProcess) -> None:
    """Of one chunk each, so that their number counts."""
    statuses = []
    for number in range(40):
        order = {"tokens": prompt(100 + number, 1), "seconds": 60, "tenant": str(number % 2)}
        statuses.append(control.ask("POST", "/v1/pin", order)[0])
    assert set(statuses) == {200}
    for each in control.ask("GET", "/v1/directives")[1]:
        if each["state"] == "held":
            control.ask("DELETE", f"/v1/directives/{each['id']}")


def test_the_document_names_every_path_and_body(control: ControlProcess) -> None:
    status, document = control.ask("GET", "/openapi.json")
    assert (status, document["openapi"]) == (200, "3.1.0")
    schemas = document["components"]["schemas"]

    def refs(part: Any) -> set[str]:
        if isinstance(part, dict):
            own = {part["$ref"]} if isinstance(part.get("$ref"), str) else set()
            return own.union(*map(refs, part.values()))
        return set().union(*map(refs, part)) if isinstance(part, list) else set()

    assert {ref.removeprefix("#/components/schemas/") for ref in refs(document)} <= set(schemas)
    for path, methods in document["paths"].items():
        for method in methods.keys() - {"parameters"}:
            status, _ = control.ask(method.upper(), path.replace("{id}", "1"), {} if method == "post" else None)
            assert status in (200, 400), (path, method)


def test_the_log_has_no_secret(control: ControlProcess) -> None:
    secrets = ("the salt of secrets", "conversation of secrets", "the token of orders", "31337")
    body = {"tokens": [31337] * 256, "salt": secrets[0], "tenant": "acme", "seconds": 60}
    assert control.ask("POST", f"/v1/conversations/{secrets[1].replace(' ', '%20')}/turn", body)[0] == 200
    assert control.ask("POST", "/v1/pin", {"tokens": "the salt of secrets"})[0] == 400
    assert "of tenant 'acme': turn of 256 tokens" in control.log
    assert not any(secret in control.log for secret in secrets)


def test_a_token_is_required(server: ServerProcess) -> None:
    refused = run("control", "--endpoint", server.endpoint)
    assert (refused.returncode, "no token is configured" in refused.stderr) == (2, True)


def test_without_a_server_orders_fail_and_the_process_stays(tmp_path: Path) -> None:
    with ServerProcess() as gone, ControlProcess(gone, tmp_path) as control:
        gone.kill9()
        status, answer = control.ask("POST", "/v1/pin", {"tokens": prompt(1, 1), "seconds": 60})
        assert (status, "no server" in answer["error"]) == (503, True)
        assert control.ask("GET", "/v1/directives") == (200, [])


def test_the_commands(server: ServerProcess, control: ControlProcess, tmp_path: Path) -> None:
    file = tmp_path / "tokens.json"
    file.write_text(json.dumps(prompt(1, 4)))
    done = run("prefetch", str(file), "--endpoint", server.endpoint, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    told = json.loads(done.stdout)
    assert (told["state"], told["l1_tokens"]) == ("done", 1024)
    pinned = run("pin", str(file), "--seconds", "0.2", "--endpoint", server.endpoint)
    assert (pinned.returncode, pinned.stdout) == (0, "pin: 1024 of 1024 tokens are in L1, held\n")


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"{}", "Expected `array`"), (b"[1, 2", "truncated"), (b" " * ((16 << 20) + 1), "is too large")],
)
def test_bad_files(server: ServerProcess, tmp_path: Path, content: bytes, words: str) -> None:
    file = tmp_path / "tokens.json"
    file.write_bytes(content)
    for command in (("prefetch",), ("pin", "--seconds", "60"), ("clear", "--yes", "--prefix")):
        done = run(command[0], *command[1:], str(file), "--endpoint", server.endpoint)
        assert (done.returncode, words in done.stderr) == (2, True), done.stderr


def test_a_server_that_hangs_holds_nothing_up_for_long(tmp_path: Path) -> None:
    """Orders fail by a time limit, the process answers what needs no server, and afterwards all goes on."""
    with (
        ServerProcess(capacity="4MiB") as server,
        Engine(server) as engine,
        ControlProcess(server, tmp_path) as control,
    ):
        engine.save(prompt(1, 4))
        pinned = control.order("/v1/pin", tokens=prompt(1, 4), seconds=3600)["id"]
        server.sigstop()
        try:
            status, answer = control.ask("POST", "/v1/forget", {"tokens": prompt(2, 1), "wait_s": 0})
            assert (status, answer["error"][:1]) == (503, "[")
            assert control.ask("GET", "/livez") == (200, "ok\n")
            assert control.directive(pinned)["state"] in ("held", "waiting")
        finally:
            server.sigcont()
        wait_until(lambda: control.ask("POST", "/v1/prefetch", {"tokens": prompt(1, 4)})[0] == 200, what="an order")
        wait_until(lambda: control.directive(pinned)["state"] == "held", what="the pin")
