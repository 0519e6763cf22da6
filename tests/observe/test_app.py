"""Paths, formats and rights of the HTTP answers, without a socket."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable

import pytest

from kvf_observe import page
from kvf_observe.app import App
from kvf_observe.http.exposition import OPEN_METRICS, TEXT
from kvf_observe.http.messages import HEADERS, Reply, Request, Rights
from kvf_observe.poller import History, Observed
from tests.observe.documents import answered, document, unanswered

PATHS = ("/", "/metrics", "/livez", "/readyz", "/status", "/history.json")


def fresh(observed: Observed) -> Observed:
    import time

    return observed._replace(at=time.monotonic())


def app(observed: Observed | None = None, token: Callable[[], str] = lambda: "", *, loopback: bool = False) -> App:
    history = History()
    latest = fresh(observed or answered())
    history.add(latest)
    return App(lambda: latest, history, rights=Rights(token, loopback=loopback))


def get(target: str, made: App | None = None, method: str = "GET", **headers: str) -> Reply:
    return (made or app()).answer(Request(method, target, headers))


@pytest.mark.parametrize("path", PATHS)
def test_every_path_answers_also_while_the_server_is_away(path: str) -> None:
    reply = get(path)
    assert reply.status == 200
    assert reply.body
    away = {"/livez": 503, "/readyz": 503, "/status": 503}
    assert get(path, app(unanswered())).status == away.get(path, 200)


@pytest.mark.parametrize(
    "target",
    [
        "/none",
        "",
        "//",
        "/metrics/",
        "/../etc/passwd",
        "/%2e%2e/x",
        "/page/../index.html",
        "/index.html",
        "/METRICS",
        "http://127.0.0.1/metrics",
        "*",
        "/\x00",
        "/metrics;x",
        "/__init__.py",
        "/ü",
    ],
)
def test_other_paths_are_not_found(target: str) -> None:
    assert get(target).status == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "TRACE", "CONNECT", "BREW", "get"])
def test_other_methods_are_refused(method: str) -> None:
    reply = get("/metrics", method=method)
    assert (reply.status, reply.headers) == (405, (("allow", "GET, HEAD"),))


@pytest.mark.parametrize("target", ["/readyz?" + "&".join("a=b" * 1 for _ in range(99)), "/history.json?after=x"])
def test_a_query_that_makes_no_sense_is_refused(target: str) -> None:
    assert get(target).status == 400


def test_the_format_of_metrics_is_the_scrapers_choice() -> None:
    made = app()
    assert get("/metrics", made).type == TEXT
    assert (
        get("/metrics", made, accept="application/openmetrics-text;version=1.0.0,text/plain;q=0.5").type == OPEN_METRICS
    )
    assert get("/metrics", made, accept="*/*").type == TEXT
    assert get("/metrics", made).body is get("/metrics", made).body  # made once a poll


def test_the_status_is_the_servers_document() -> None:
    observed = answered()
    assert get("/status", app(observed)).body == observed.raw


def test_queries_of_readyz() -> None:
    down = app(answered(document(l2__0__state="open", l2__0__circuits__read="open", l1__ready_bytes=1)))
    assert get("/readyz", down).status == 503
    assert get("/readyz?exclude=l1", down).status == 200
    assert get("/readyz?exclude=l1&require=l2", down).status == 503
    assert b"[~]l2.0" in get("/readyz?verbose&exclude=l1", down).body


def test_with_a_token_only_probes_answer_without_it_and_name_no_facts() -> None:
    failing = answered(document(l1__ready_bytes=1))
    made = app(failing, lambda: "s3cret")
    basic = base64.b64encode(b"any:s3cret").decode()
    wrong = [
        "",
        "Bearer",
        "Bearer x",
        "Bearer s3cret2",
        "Basic s3cret",
        "Basic !",
        "s3cret",
        "Digest s3cret",
        "Bearer ü",
    ]
    for path in PATHS:
        for authorization in wrong:
            reply = get(path, made, authorization=authorization)
            if path in ("/livez", "/readyz"):
                assert reply.body in (b"ok\n", b"failed\n")
            else:
                assert reply.status == 401
                assert dict(reply.headers)["www-authenticate"].startswith("Basic")
        for authorization in ("Bearer s3cret", "bearer s3cret", f"Basic {basic}"):
            assert get(path, made, authorization=authorization).status in (200, 503)
    assert get("/readyz?verbose", made).body == b"failed\n"
    assert b"[-]l1" in get("/readyz", made, authorization="Bearer s3cret").body


def test_a_token_that_cannot_be_read_lets_no_caller_in() -> None:
    def unreadable() -> str:
        raise OSError("gone")

    made = app(token=unreadable)
    assert get("/status", made, authorization="Bearer ").status == 401
    assert get("/livez", made).status == 200


def test_on_loopback_the_name_of_another_host_is_refused() -> None:
    made = app(loopback=True)
    for host in (
        "localhost",
        "localhost:9309",
        "127.0.0.1:9309",
        "[::1]:9309",
        "[::1]",
        "LOCALHOST:1",
        "127.0.0.2:9309",
    ):
        assert get("/status", made, host=host).status == 200
    for host in (
        "",
        "evil.example",
        "evil.example:9309",
        "localhost.evil.example",
        "127.0.0.1.evil.example:80",
        "10.0.0.1",
    ):
        assert get("/status", made, host=host).status == 421


def test_history_is_given_from_a_time_on() -> None:
    document_of_all = json.loads(get("/history.json").body)
    assert len(document_of_all["seconds"]) == len(document_of_all["minutes"]) == 1
    assert json.loads(get("/history.json?after=9e9").body)["seconds"] == []


def test_the_page_needs_nothing_from_elsewhere() -> None:
    policy = dict(HEADERS)["content-security-policy"]
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy
    files = page.files()
    assert "/" in files
    for file in files.values():
        text = file.content.decode()
        assert not re.search(
            r"""(?:src|href|url)\s*[=(]\s*["']?(?:https?:)?//""", text.replace("http://www.w3.org/", "")
        )
        assert not re.search(r"\son\w+=|<style|style=|javascript:", text), "the policy allows none of it"
