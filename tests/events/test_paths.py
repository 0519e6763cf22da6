"""Each way of a transfer brings its content; each tier is announced; over TCP only with keys."""

from __future__ import annotations

import array
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
import zmq

from kvf_hashers.sha256 import Sha256
from kvframework.api.keys import ChunkContent
from kvframework.client import KVClient, RequestHashes
from kvframework.errors import BadRange
from kvframework.wire import messages as m
from kvframework.wire.protocol import SALTED_TOKEN_IDS, TOKEN_IDS
from tests.core.server.gated_transport import GatedPlugin
from tests.core.server.in_process import serving
from tests.core.server.test_server_driven import TOKENS, register, transfer
from tests.core.wire_path.remote import Keys
from tests.events.node import CHUNK, Engine, Router, beginnings, packed, prompt, router, settings
from tests.events.test_announced import TellingServer
from tests.support import engines as paged
from tests.support.ports import free_port
from tests.support.server_process import ServerProcess
from tests.support.waiting import wait_until
from tests.support.wire_client import WireClient

LONG = list(range(5, 2 * paged.CHUNK + 5))


def keeping(engine: paged.PagedEngine, tokens: list[int]) -> RequestHashes:
    """The request of an engine that keeps tokens for a server that wants them."""
    client = engine.client
    made = RequestHashes(client.hasher, paged.CHUNK, request_id="r", keep_tokens=client.wants_tokens())
    made.extend(tokens[:100])
    made.extend(tokens[100:])
    return made


@pytest.mark.torch
def test_adapters_bring_the_tokens_on_both_paths_of_engines(tmp_path: Path) -> None:
    port = free_port()
    with ServerProcess("server.insecure=true", f"server.tcp=tcp://127.0.0.1:{port}") as server:
        server.stop()
        folder = Path(server.endpoint.removeprefix("ipc://")).parent
        server.set(*settings(folder, block_size=paged.BLOCK), f"server.chunk_size={paged.CHUNK}")
        server.start()
        wanted: set[tuple[int, ...]] = set()
        with router(server) as reader:
            for number, endpoint in enumerate((server.endpoint, f"tcp://127.0.0.1:{port}")):
                with KVClient(endpoint, deadline_scale=20.0) as client:
                    assert client.wait_up(60)
                    engine = paged.PagedEngine(client, number + 1)
                    tokens = [number, *LONG[1:]]
                    assert engine.store(keeping(engine, tokens), list(range(32)))
                    wanted |= beginnings(tokens, block=paged.BLOCK)
                    reader.until(wanted)
                    # Of what no one has named, the load says what it is.
                    unnamed = [number + 50, *LONG[1:]]
                    assert engine.store(engine.request(unnamed), list(range(32)))
                    assert engine.retrieve(keeping(engine, unnamed), list(range(32, 64)))
                    wanted |= beginnings(unnamed, block=paged.BLOCK)
                    reader.until(wanted)


def test_a_client_hears_in_hello_what_is_wanted() -> None:
    with ServerProcess() as quiet, KVClient(quiet.endpoint) as client:
        assert client.wait_up(60)
        assert not client.wants_tokens()
        assert not {TOKEN_IDS, SALTED_TOKEN_IDS} & set(client.hello.features)
        assert quiet.status()["events"] == {}
    with TellingServer(salted="tell") as telling, KVClient(telling.endpoint) as client:
        assert client.wait_up(60)
        assert client.wants_tokens()
        assert client.wants_tokens("salt")
        with telling.client() as wire, router(telling) as reader:
            Engine(wire).store(prompt(1, 1), salt="tenant")
            reader.until(beginnings(prompt(1, 1)))


def test_requests_keep_tokens_only_if_they_are_asked_to() -> None:
    plain = RequestHashes(Sha256(), CHUNK, request_id="r")
    plain.extend(prompt(1, 2))
    assert plain.content(0, CHUNK) is None
    keeping = RequestHashes(Sha256(), CHUNK, request_id="r", keep_tokens=True, lora_name="poet")
    keeping.extend(prompt(1, 2)[:5], {1: b"extra"})
    keeping.extend(prompt(1, 2)[5:])
    content = keeping.content(CHUNK, 2 * CHUNK)
    assert content.tokens == packed(prompt(1, 2)[CHUNK:])
    assert [(each.chunk, each.content) for each in content.extras] == [(0, b"extra")]
    assert content.lora_name == "poet"
    assert keeping.content(2 * CHUNK, 3 * CHUNK) is None


def test_a_transfer_that_the_server_drives_brings_its_content(tmp_path: Path) -> None:
    plugin = GatedPlugin()
    memory = tmp_path / "memory"
    memory.write_bytes(bytes(1 << 20))
    announced = settings(tmp_path, block_size=16)[1:]
    with (
        serving("transport.1.use=gated", *announced, plugins=(plugin,)) as server,
        WireClient(server.endpoint) as client,
    ):
        plugin.transport.gate.release(1000)
        register(client, memory)
        digests = Sha256().chunk_digests(packed(TOKENS), 256)
        with closing(Router(f"ipc://{tmp_path}/told.sock", f"ipc://{tmp_path}/again.sock")) as reader:
            request = transfer(list(range(32)))
            named = msgspec.structs.replace(request.key, tokens=b"", digests=digests)
            bare = msgspec.structs.replace(request, key=named)
            assert client.call("STORE", bare).ok
            with pytest.raises(BadRange):
                client.call("RETRIEVE", msgspec.structs.replace(bare, content=ChunkContent(b"abcd")))
            content = ChunkContent(array.array("I", TOKENS).tobytes())
            assert client.call("RETRIEVE", msgspec.structs.replace(bare, content=content)).ok
            reader.until(beginnings(TOKENS, block=16))
            client.call("CLEAR", m.Clear())
            reader.until(set())
            assert client.call("STORE", msgspec.structs.replace(bare, content=content)).ok
            reader.until(beginnings(TOKENS, block=16))


def test_what_a_tier_holds_is_told_until_it_is_gone_there(tmp_path: Path) -> None:
    disk = ("l2.0.use=filesystem", f"l2.0.path={tmp_path / 'l2'}", "l2.0.capacity=1GiB")
    tokens = prompt(1, 3)
    with TellingServer(*disk) as server, router(server) as reader:
        with server.client() as client:
            Engine(client).store(tokens)
            reader.until(beginnings(tokens), "STORAGE")
            client.call("CLEAR", m.Clear())
            reader.until(set())
            assert reader.prompts("STORAGE") == beginnings(tokens)
        server.stop()
        server.start()
        reader.until(set(), "STORAGE")  # what the tier still has is learnt by use
        with server.client() as client:
            engine = Engine(client)
            wait_until(lambda: engine.hit(tokens) == len(tokens), 30, "the load from the tier")
            assert engine.load(tokens)
            reader.until(beginnings(tokens))
            reader.until(beginnings(tokens), "STORAGE")
            assert client.status()["events"]["blocks"] == {"CPU": 12, "STORAGE": 12}
            client.call("CLEAR", m.Clear(l2=True))
            reader.until(set())
            reader.until(set(), "STORAGE")


def test_over_tcp_a_reader_needs_an_admitted_key(tmp_path: Path) -> None:
    keys = Keys(tmp_path / "keys")
    keys.add("stranger", admitted=False)
    announced, again = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
    with (
        ServerProcess(*keys.settings, *settings(tmp_path, endpoint=announced, replay=again)) as server,
        server.client() as client,
    ):
        Engine(client).store(prompt(1, 2))
        reader = Router(announced, again, keys.of("client").load())
        stranger = Router(announced, again, keys.of("stranger").load())
        plain = Router(announced, again)
        try:
            reader.until(beginnings(prompt(1, 2)))
            wait_until(lambda: client.status()["events"]["counters"]["curve_refused"] > 0, 30, "the refusal")
            for each in (stranger, plain):
                assert not each.read(0.2)
                socket = each.question()
                assert not socket.poll(200, zmq.POLLIN)
                socket.close()
        finally:
            for each in (reader, stranger, plain):
                each.close()


@pytest.mark.torch
def test_a_chunk_that_the_model_sizes_holds_whole_blocks(tmp_path: Path) -> None:
    """Of a model with 4 KiB a token, whose chunks have 64 tokens otherwise."""
    own = [each for each in settings(tmp_path, block_size=128) if not each.startswith("server.chunk_size")]
    with ServerProcess(*own) as server, KVClient(server.endpoint) as client:
        assert client.hello.least_chunk == 128
        assert paged.PagedEngine(client, wide=256).chunk == 128
