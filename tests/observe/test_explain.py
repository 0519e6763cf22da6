"""`kvframework explain` against a real server: one request, the last misses, nothing to tell, and servers that cannot
answer."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Iterator

import msgspec
import pytest
from rich.console import Console

from kvf_observe.explain import ANSWERS, PAGE, clock, headline, print_explained, sentences, why
from kvframework.api.listener import Finished
from kvframework.status import REASONS
from kvframework.wire import messages as m
from kvframework.wire.transfer_blocks import pack_indices
from tests.core.cli.command import run
from tests.core.server.in_process import serving, serving_without
from tests.support.wire_client import WireClient, key_for

TOKENS = list(range(1024))
MISS = Finished(
    1, "LOOKUP", 1e9, 5.0, 0.0021, "cmpl-1", "vllm", 77, 3, "m", "abcd0123", "partial", 0, 4096, 1024, 512, 1536, 256
)


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    """Of a server that has seen a miss, a store, a hit and a load."""
    with serving() as server, WireClient(server.endpoint) as client:
        registered = client.register()
        client.lookup(key_for(registered, TOKENS, request_id="first"))
        client.store(key_for(registered, TOKENS, request_id="first"), b"x")
        client.lookup(key_for(registered, TOKENS, request_id="second"))
        client.retrieve(key_for(registered, TOKENS, request_id="second"))
        yield server.endpoint


def explained(endpoint: str, *arguments: str) -> str:
    done = run("explain", *arguments, "--endpoint", endpoint)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_the_last_misses_are_told_with_their_reason_and_what_to_do(endpoint: str) -> None:
    text = explained(endpoint)
    assert "LOOKUP first of test (process " in text
    assert "found   0 of 1024 tokens in" in text
    assert "0 in L1, 0 from L2, 1024 missed" in text
    assert "missing tokens 0 to 256, and all later tokens" in text
    assert "why     the tokens were never stored since the server started at " in text
    assert f"do      {ANSWERS['never_stored'].advice}" in text
    assert "second" not in text


def test_one_request_is_told_whole(endpoint: str) -> None:
    text = explained(endpoint, "second")
    assert "1024 of 1024 tokens" in text
    assert "moved   hit: 1024 tokens in" in text
    assert "4 objects, 128.0 KiB, copied by the engine" in text
    assert "why " not in text
    assert "first" not in text


def test_all_requests_are_told(endpoint: str) -> None:
    text = explained(endpoint, "--all", "--last", "3")
    assert text.count("of test (process") == 3
    assert "stored: 1024 tokens" in text


def test_a_store_counts_what_it_added() -> None:
    with serving() as server, WireClient(server.endpoint) as client:
        registered = client.register()
        client.store(key_for(registered, TOKENS[:512], request_id="half"), b"x")
        client.store(key_for(registered, TOKENS, request_id="whole"), b"x")
        client.store(key_for(registered, TOKENS, request_id="again"), b"x")
        half, whole, again = (explained(server.endpoint, name) for name in ("half", "whole", "again"))
    assert "moved   stored: 512 tokens in" in half
    assert "moved   stored: 512 of 1024 tokens in" in whole
    assert "2 objects, 64.0 KiB, copied by the engine; the rest was already stored" in whole
    assert "moved   present: 1024 tokens in" in again


def test_a_store_over_the_wire_counts_what_it_added() -> None:
    with serving() as server, WireClient(server.endpoint) as client:
        registered = client.register()
        client.store(key_for(registered, TOKENS[:512]), b"x")
        size = registered.desc.nbytes
        key = key_for(registered, TOKENS, request_id="whole")
        client.call("STORE_CPU_CHUNKS", m.StoreCpuChunks(key, 1, pack_indices(range(4))), *[b"y" * size] * 4)
        (record,) = json.loads(explained(server.endpoint, "whole", "--json"))["records"]
    assert (record["outcome"], record["objects"], record["added_tokens"]) == ("stored", 2, 512)


def test_a_store_that_fails_added_nothing() -> None:
    with serving() as server, WireClient(server.endpoint) as client:
        registered = client.register()
        plan = client.prepare_store(key_for(registered, TOKENS, request_id="one"))
        client.call("ABORT", m.LeaseRef(plan.lease))
        (record,) = json.loads(explained(server.endpoint, "one", "--json"))["records"]
    assert (record["outcome"], record["added_tokens"]) == ("failed", 0)


def test_the_document_has_every_field(endpoint: str) -> None:
    document = json.loads(explained(endpoint, "--json", "--all", "--last", "100"))
    assert (document["last"], document["forgotten"]) == (4, 0)
    assert [each["request"] for each in document["records"]] == ["LOOKUP", "STORE", "LOOKUP", "RETRIEVE"]
    for each in document["records"]:
        assert each.keys() == set(Finished.__struct_fields__)
    (miss,) = json.loads(explained(endpoint, "--json"))["records"]
    assert (miss["reason"], miss["asked_tokens"], miss["missing"]) == ("never_stored", 1024, 0)


def test_a_request_that_is_not_known(endpoint: str) -> None:
    done = run("explain", "third", "--endpoint", endpoint)
    assert done.returncode == 2
    assert "no finished request has the id 'third'" in done.stderr
    assert "an id of 4 requests that are remembered; 0 are" in done.stderr


def test_nothing_to_tell() -> None:
    with serving() as server:
        assert "no lookup missed a token among the 0 requests" in explained(server.endpoint)
        assert "no request has finished among the 0 requests" in explained(server.endpoint, "--all")


def test_an_older_server() -> None:
    with serving_without("RECENT") as server:
        done = run("explain", "--endpoint", server.endpoint)
    assert done.returncode == 2
    assert "the server is of an older release" in done.stderr


def test_a_request_and_a_number_do_not_go_together(endpoint: str) -> None:
    assert run("explain", "r", "--last", "3", "--endpoint", endpoint).returncode == 2


@pytest.mark.parametrize("reason", REASONS)
def test_every_reason_has_its_sentence_and_its_advice(reason: str) -> None:
    record = msgspec.structs.replace(MISS, reason=reason, detail="the detail", cause_at=1e9, idle_s=40.0)
    told = dict(sentences(record, 1e9))
    assert reason not in told["why"] or "_" not in reason, "a sentence, not the name"
    assert told["do"] == ANSWERS[reason].advice
    assert told["see"] == f"{PAGE}, {reason}"


def test_an_eviction_has_its_time_its_idle_time_and_its_cause() -> None:
    record = msgspec.structs.replace(MISS, reason="evicted", cause_at=1e9, idle_s=40.04, by="other")
    told = why(record, 0.0)
    assert told == f"L1 evicted the tokens at {clock(1e9)} after 40 s without use, for an object of model other"


def test_the_tenant_and_the_trace_are_named() -> None:
    record = msgspec.structs.replace(MISS, tenant="acme", trace=f"00-{'ab' * 16}-{'cd' * 8}-01")
    told = dict(sentences(record, 1e9))
    assert (told["tenant"], told["trace"]) == ("acme", "ab" * 16)
    assert not {"tenant", "trace"} & dict(sentences(MISS, 1e9)).keys()


def test_a_time_of_today_has_no_date() -> None:
    assert len(clock(time.time())) == len("10:02:13")
    assert len(clock(1e9)) == len("2001-09-09 01:46:40")


@pytest.mark.parametrize("reason", REASONS)
def test_it_fits_80_columns_and_shows_texts_verbatim(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    console = Console(file=out, width=80, force_terminal=True, color_system=None, soft_wrap=True, highlight=False)
    monkeypatch.setattr("kvframework.api.console.stdout", console)
    record = msgspec.structs.replace(
        MISS, reason=reason, request_id="[red]r[/red]", client="a\nb", detail="in what " * 10, by="a model"
    )
    print_explained([record, record], 1e9)
    assert max(map(len, out.getvalue().splitlines())) <= 80
    assert "[red]r[/red] of a; b" in out.getvalue()
    assert headline(record).startswith(clock(1e9))
