"""An engine process of another release: stores one prompt and looks it up again and again; a JSON line on standard
output for each look, its log on standard error. Ends with its standard input."""

from __future__ import annotations

import json
import logging
import select
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

from kvframework.api.keys import CacheKey
from kvframework.api.transport import Registration
from kvframework.client import KVClient, RequestHashes, SchedulerAdapter
from kvframework.client.kv_client import bare_transfer
from kvframework.errors import KVFrameworkError
from kvframework.messaging.client import connection
from kvframework.wire import messages as m
from kvframework.wire.protocol import non_gpu_layout
from tests.core.wire_versions.other_release import become

PAYLOAD = m.RegisterNonGpuContextPayload(1, "m", 1, 16, 2, 8, "float32", False)
TOKENS = range(512)


class Engine:
    def __init__(self, client: KVClient) -> None:
        self._client = client
        self._scheduler: SchedulerAdapter | None = None
        self._request: RequestHashes | None = None
        client.when_up(self._register)

    def look(self) -> dict[str, object]:
        hit, error = 0, ""
        try:
            if self._scheduler is None:
                _ = self._client.hello
                self._register()
            assert self._scheduler is not None
            assert self._request is not None
            found = self._scheduler.lookup(self._request)
            self._scheduler.free(found)
            hit = found.hit_tokens
            if not hit and self._client.usable:
                self._store()
        except KVFrameworkError as failure:
            error = failure.code
        failures = self._scheduler.failures if self._scheduler else 0
        return {"usable": self._client.usable, "hit": hit, "error": error, "failures": failures}

    def _register(self) -> None:
        reply = self._client.request(
            "REGISTER_KV_CACHE_NON_GPU_CONTEXT", PAYLOAD, m.Registered, timeout=5.0, urgent=True
        )
        self._request = RequestHashes(self._client.hasher, reply.desc.chunk_tokens, request_id="r")
        self._request.extend(TOKENS)
        self._namespace = reply.namespace
        self._registration = Registration(1, 0, reply.namespace, non_gpu_layout(PAYLOAD), reply.desc)
        self._scheduler = self._scheduler or SchedulerAdapter(
            self._client, model_name="m", namespace=reply.namespace, chunk_tokens=reply.desc.chunk_tokens
        )

    def _store(self) -> None:
        assert self._request is not None
        end = self._request.hashed_tokens
        key = CacheKey("m", 1, 0, self._namespace, 0, end, "r", digests=self._request.digests(end))
        with self._client.prepare_store(bare_transfer(self._registration, key)).result() as plan:
            for place in plan.ranges:
                plan.arena[place.offset : place.offset + place.length] = b"k" * place.length
            plan.commit().result()


def main(endpoint: str) -> None:
    logging.basicConfig(level="INFO", format="%(levelname)s %(message)s", force=True)
    become()
    connection.LOG_AGAIN_S = 1.0
    with KVClient(endpoint, name="engine of another release", connect_timeout_s=0.2, deadline_scale=20.0) as client:
        engine = Engine(client)
        while not select.select([sys.stdin], [], [], 0.1)[0]:
            print(json.dumps(engine.look()), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
