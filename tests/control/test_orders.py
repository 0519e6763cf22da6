"""Orders over HTTP at a real server with a tier: what is loaded, kept, left first and deleted; also where the server is
replaced."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvf_hashers.sha256 import Sha256
from kvframework.wire import messages as m
from tests.control.control_process import CHUNK, OBJECT, ControlProcess, Engine, prompt
from tests.support.server_process import ServerProcess
from tests.support.waiting import wait_until
from tests.support.wire_client import WireClient

L1_CHUNKS = 128  # of 4 MiB
SALT = "the salt of acme"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    with ServerProcess("l2.0.use=filesystem", f"l2.0.path={tmp_path / 'l2'}", capacity="4MiB") as server:
        yield server


@pytest.fixture
def plain() -> Iterator[ServerProcess]:
    with ServerProcess(capacity="4MiB") as server:
        yield server


def only_in_the_tier(client: WireClient) -> None:
    wait_until(lambda: not any(tier["write_pending"] for tier in client.status()["l2"]), what="the writes")
    client.call("CLEAR", m.Clear())


def ahead(client: WireClient) -> tuple[int, int]:
    """The bytes that were prefetched and used, and those that left unused."""
    counters = client.status()["l1"]["counters"]
    return counters["ahead_used_bytes"], counters["ahead_wasted_bytes"]


def l1_objects(client: WireClient) -> int:
    return int(client.status()["l1"]["objects"])


def done(control: ControlProcess, name: str) -> dict[str, object]:
    wait_until(lambda: control.directive(name)["state"] not in ("loading", "waiting"), what="the order")
    return control.directive(name)


def test_a_prefetch_is_in_l1_before_its_request_and_counts_as_no_lookup(server: ServerProcess, tmp_path: Path) -> None:
    tokens = prompt(1, 4)
    with Engine(server) as client, ControlProcess(server, tmp_path) as control:
        client.save(tokens, cache_salt=SALT)
        only_in_the_tier(client)
        before = client.status()["lookups"]
        told = control.order("/v1/prefetch", tokens=[*tokens, 7], salt=SALT)
        assert told["asked_tokens"] == len(tokens)
        assert done(control, told["id"])["l1_tokens"] == len(tokens)
        status = client.status()
        assert (status["l1"]["objects"], status["lookups"]["lookups"]) == (4, before["lookups"])
        wait_until(lambda: client.status()["l1"]["pins"] == 0, what="the end of the order's pins")
        assert client.l1_tokens(tokens, cache_salt=SALT) == len(tokens)
        assert ahead(client) == (4 * OBJECT, 0)
        # Under another salt there is nothing, and that is no error.
        other = control.order("/v1/prefetch", tokens=tokens)
        assert done(control, other["id"])["l1_tokens"] == 0


def test_digests_name_a_prompt_too(server: ServerProcess, tmp_path: Path) -> None:
    tokens = prompt(1, 3)
    packed = Sha256().chunk_digests(b"".join(each.to_bytes(4, "little") for each in tokens), CHUNK)
    with Engine(server) as client, ControlProcess(server, tmp_path) as control:
        client.save(tokens)
        only_in_the_tier(client)
        told = control.order("/v1/prefetch", digests=[packed[at : at + 32].hex() for at in range(0, len(packed), 32)])
        assert done(control, told["id"])["l1_tokens"] == len(tokens)
        assert (l1_objects(client), ahead(client)) == (3, (0, 0))
        wait_until(lambda: client.status()["l1"]["pins"] == 0, what="the end of the order's pins")
        client.fill_up(L1_CHUNKS)
        assert ahead(client) == (0, 3 * OBJECT)


def test_a_pin_keeps_its_chunks_until_it_ends(plain: ServerProcess, tmp_path: Path) -> None:
    kept, other = prompt(1, 8), prompt(2, 8)
    with Engine(plain) as client, ControlProcess(plain, tmp_path) as control:
        client.save(kept)
        client.save(other)
        told = control.order("/v1/pin", tokens=kept, seconds=3600)
        assert (told["state"], told["l1_tokens"]) == ("held", len(kept))
        client.fill_up(2 * L1_CHUNKS)
        assert control.directive(told["id"])["state"] == "held"
        assert client.l1_tokens(other) == 0
        # The latest order counts.
        again = control.order("/v1/pin", tokens=kept, seconds=60)
        assert control.directive(told["id"])["state"] == "ended"
        assert control.ask("DELETE", f"/v1/directives/{again['id']}")[0] == 200
        wait_until(lambda: client.status()["l1"]["pins"] == 0, what="the end of the pin")
        client.fill_up(2 * L1_CHUNKS)
        assert client.l1_tokens(kept) == 0


def test_a_pin_ends_with_its_time(plain: ServerProcess, tmp_path: Path) -> None:
    with Engine(plain) as client, ControlProcess(plain, tmp_path) as control:
        client.save(prompt(1, 2))
        told = control.order("/v1/pin", tokens=prompt(1, 2), seconds=0.5)
        wait_until(lambda: control.directive(told["id"])["state"] == "ended", what="its time")
        wait_until(lambda: client.status()["l1"]["pins"] == 0, what="the end of its pins")


def test_a_pin_outlasts_a_takeover(plain: ServerProcess, tmp_path: Path) -> None:
    tokens = prompt(1, 8)
    with ControlProcess(plain, tmp_path) as control:
        with Engine(plain) as client:
            client.save(tokens)
            told = control.order("/v1/pin", tokens=tokens, seconds=3600)
        assert plain.take_over() == 0
        with Engine(plain) as client:
            wait_until(lambda: client.status()["l1"]["pins"] == 8, what="the pin at the next server")
            client.fill_up(2 * L1_CHUNKS)
            assert client.l1_tokens(tokens) == len(tokens)
        assert control.directive(told["id"])["state"] == "held"


def test_a_pin_outlasts_a_server_that_lost_l1(server: ServerProcess, tmp_path: Path) -> None:
    """The next server loads it from the tier."""
    tokens = prompt(1, 4)
    with ControlProcess(server, tmp_path) as control:
        with Engine(server) as client:
            client.save(tokens)
            only_in_the_tier(client)
            control.order("/v1/pin", tokens=tokens, seconds=3600)
        server.kill9()
        server.start()
        with Engine(server) as client:
            wait_until(lambda: client.status()["l1"]["pins"] == 4, what="the pin at the next server")


def test_what_a_conversation_shares_outlasts_its_end(plain: ServerProcess, tmp_path: Path) -> None:
    system = prompt(1, 4)
    mine, theirs = prompt(2, 8, after=system), prompt(3, 8, after=system)
    with Engine(plain) as client, ControlProcess(plain, tmp_path) as control:
        for name, tokens in (("agent 7", mine), ("agent 8", theirs)):
            client.save(tokens)
            path = f"/v1/conversations/{name.replace(' ', '%20')}/turn"
            assert control.order(path, tokens=tokens, seconds=300)["do"] == "turn"
        ended = control.order("/v1/conversations/agent%207/end")
        assert (ended["do"], ended["asked_tokens"]) == ("end", len(mine))
        wait_until(lambda: client.status()["l1"]["pins"] == 0, what="the end of the order's pins")
        # Little room is needed, and what is done gives it.
        used = client.status()["l1"]["objects"]
        client.fill_up(L1_CHUNKS - used + 8)
        assert client.l1_tokens(mine) == len(system)
        assert client.l1_tokens(theirs) == len(theirs)
        status, answer = control.ask("POST", "/v1/conversations/agent%207/end")
        assert (status, "no order has named" in answer["error"]) == (400, True)


def test_a_conversation_is_named_by_what_it_has_come_to(server: ServerProcess, tmp_path: Path) -> None:
    first, second = prompt(1, 2), prompt(2, 2, after=prompt(1, 2))
    with Engine(server) as client, ControlProcess(server, tmp_path) as control:
        client.save(second)
        control.order("/v1/conversations/c/turn", tokens=first, seconds=60)
        control.order("/v1/conversations/c/turn", tokens=second, seconds=60)
        only_in_the_tier(client)
        told = control.order("/v1/prefetch", conversation="c")
        assert done(control, told["id"])["l1_tokens"] == len(second)


def test_a_deletion_ends_pins_and_leaves_nothing(server: ServerProcess, tmp_path: Path) -> None:
    mine, other = prompt(1, 4), prompt(2, 4)
    with Engine(server) as client, ControlProcess(server, tmp_path) as control:
        for tokens in (mine, other):
            client.save(tokens)
        wait_until(lambda: not any(tier["write_pending"] for tier in client.status()["l2"]), what="the writes")
        pins = [control.order("/v1/pin", tokens=tokens, seconds=3600)["id"] for tokens in (mine, other)]
        receipt = control.order("/v1/forget", tokens=mine)
        assert [(each["place"], each["objects"], each.get("left", 0)) for each in receipt["places"]] == [
            ("L1", 4, 0),
            ("filesystem", 4, 0),
        ]
        assert [control.directive(name)["state"] for name in pins] == ["ended", "held"]
        assert (client.l1_tokens(mine), client.l1_tokens(other)) == (0, len(other))
