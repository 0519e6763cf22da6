"""vLLM's own structs decode every batch that a server announces, field by field."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvframework.api.keys import ChunkContent, Extra, Image
from kvframework.wire import messages as m
from tests.events.node import Engine, Router, packed, prompt
from tests.events.test_announced import TellingServer
from tests.support.waiting import wait_until

# vLLM's imports take long, and warn.
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]
# A field that vLLM's own subscribers do not know, and skip.
BESIDE = {"cache_salt"}
# Lists and tuples are the same there.
encode = msgspec.json.encode


class Subscriber(Router):
    """Decodes each batch with vLLM's structs, and keeps their events."""

    def __init__(self, *endpoints: str) -> None:
        self.read_events: list[Any] = []
        super().__init__(*endpoints)

    def batch(self, payload: bytes, *, replayed: bool = False) -> None:
        from vllm.distributed.kv_events import KVEventBatch

        super().batch(payload, replayed=replayed)
        batch = msgspec.msgpack.decode(payload, type=KVEventBatch)
        sent = msgspec.msgpack.decode(payload)
        assert (batch.ts, batch.data_parallel_rank) == (sent[0], sent[2])
        for event, fields in zip(batch.events, sent[1], strict=True):
            assert fields.pop("type") == type(event).__name__
            assert fields.keys() <= {*event.__struct_fields__, *BESIDE}
            for name in fields.keys() - BESIDE:
                assert encode(fields[name]) == encode(getattr(event, name))
            self.read_events.append(event)


def test_vllms_structs_decode_every_batch(tmp_path: Path) -> None:
    disk = ("l2.0.use=filesystem", f"l2.0.path={tmp_path / 'l2'}", "l2.0.capacity=1GiB")
    with TellingServer(*disk, salted="tell", objects=36) as server, server.client() as client:
        folder = server.endpoint.rpartition("/")[0]
        with closing(Subscriber(f"{folder}/told.sock", f"{folder}/again.sock")) as reader:
            engine = Engine(client)
            tokens = prompt(1, 2)
            image = ChunkContent(packed(tokens), (Extra(0, b"cat"),), images=(Image("cat", 3, 9),))
            adapter = ChunkContent(packed(tokens), (Extra(0, b"poet"),), lora_name="poet")
            for content in (image, adapter):
                engine.store(tokens, content=content)
            engine.store(tokens, salt="tenant")
            for number in range(100, 140):
                engine.store(prompt(number, 3))
            wait_until(lambda: not client.status()["events"]["waiting"], what="what waits")
            client.call("CLEAR", m.Clear(l2=True))
            engine.store(prompt(7, 1))

            def all_read() -> bool:
                while reader.read():
                    pass
                return bool(reader.next == client.status()["events"]["next_number"] and reader.prompts())

            wait_until(all_read, 60, "the last batch")
        stored = [each for each in reader.read_events if type(each).__name__ == "BlockStored"]
        removed = [each for each in reader.read_events if type(each).__name__ == "BlockRemoved"]
        assert {each.medium for each in (*stored, *removed)} == {"CPU", "STORAGE"}
        keys = [each.extra_keys[0] for each in stored if each.extra_keys]
        assert {("cat", 3), ("poet",), ("dynamo-cache-salt:tenant",)} <= {
            tuple(key[0]) if isinstance(key[0], list | tuple) else tuple(key) for key in keys if key
        }
        assert {each.lora_name for each in stored} == {None, "poet"}
