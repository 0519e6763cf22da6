"""The decoders of llm-d and AIBrix, unchanged, take every batch of a server: programs that go/README.md describes."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvframework.api.keys import ChunkContent, Extra, Image
from kvframework.wire import messages as m
from tests.events.node import BLOCK, Engine, Router, packed, prompt
from tests.events.reader import as_map
from tests.events.test_announced import TellingServer
from tests.support.waiting import wait_until


class Decoder(Router):
    """Gives every message, live or replayed, to a decoder, and compares."""

    def __init__(self, program: subprocess.Popen[str], with_topic: bool, *endpoints: str) -> None:
        super().__init__(*endpoints)
        self.decoded = 0
        self._program = program
        self._with_topic = with_topic

    def _apply(self, topic: bytes, number: int, payload: bytes, *, replayed: bool) -> None:
        super()._apply(topic, number, payload, replayed=replayed)
        self._program.stdin.write(f"{topic.decode()} " * self._with_topic + payload.hex() + "\n")
        self._program.stdin.flush()
        answer = json.loads(self._program.stdout.readline())
        assert "error" not in answer, answer
        if self._with_topic:
            assert ["kv", answer["Pod"], answer["Model"]] == topic.decode().split("@")
        for sent, read in zip(msgspec.msgpack.decode(payload)[1], answer["Events"] or [], strict=True):
            self._same(sent if isinstance(sent, dict) else as_map(sent), read)
            self.decoded += 1

    @staticmethod
    def _same(sent: dict[str, Any], read: dict[str, Any]) -> None:
        assert read["BlockHashes"] == sent["block_hashes"]
        if sent["type"] == "BlockStored":
            assert read.get("Tokens", sent["token_ids"]) == sent["token_ids"]
            assert len(read.get("TokenIDs", sent["block_hashes"])) == len(sent["block_hashes"])
            assert read.get("BlockSize", BLOCK) == BLOCK
            assert (read.get("ParentHash", read.get("ParentBlockHash")) or None) == sent["parent_block_hash"]
            assert read.get("DeviceTier", read.get("Medium")) == sent["medium"]
            assert read["LoraName"] == sent.get("lora_name")
            assert read.get("ExtraKeys", sent.get("extra_keys")) == sent.get("extra_keys")


@contextmanager
def program(variable: str) -> Iterator[subprocess.Popen[str]]:
    named = os.environ.get(variable)
    if not named:
        pytest.skip(f"{variable} names no program: tests/route/routers/go/README.md")
    with subprocess.Popen([named], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as running:
        yield running


@pytest.mark.parametrize(
    ("variable", "form"), [("KVF_ROUTERS_LLMD", "map"), ("KVF_ROUTERS_LLMD", "array"), ("KVF_ROUTERS_AIBRIX", "array")]
)
def test_a_decoder_reads_what_is_sent(tmp_path: Path, variable: str, form: str) -> None:
    disk = ("l2.0.use=filesystem", f"l2.0.path={tmp_path / 'l2'}", "l2.0.capacity=1GiB")
    with (
        program(variable) as decoder,
        TellingServer(*disk, salted="tell", objects=36, format=form) as server,
        server.client() as client,
    ):
        folder = server.endpoint.rpartition("/")[0]
        places = f"{folder}/told.sock", f"{folder}/again.sock"
        with closing(Decoder(decoder, variable == "KVF_ROUTERS_LLMD", *places)) as reader:
            engine = Engine(client)
            tokens = prompt(1, 2)
            image = ChunkContent(packed(tokens), (Extra(0, b"cat"),), images=(Image("cat", 3, 9),))
            for content in (image, ChunkContent(packed(tokens), lora_name="poet")):
                engine.store(tokens, content=content)
                client.call("CLEAR", m.Clear())
            engine.store(tokens, salt="tenant")
            for number in range(100, 140):
                engine.store(prompt(number, 3))
            client.call("CLEAR", m.Clear(l2=True))
            engine.store(prompt(7, 1))

            def all_read() -> bool:
                while reader.read():
                    pass
                return bool(reader.next == client.status()["events"]["next_number"] and reader.prompts())

            wait_until(all_read, 60, "the last batch")
            assert reader.kinds["BlockStored"]
            assert reader.kinds["BlockRemoved"]
            assert reader.decoded == sum(reader.kinds.values())
