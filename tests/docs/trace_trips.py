"""A program that traces which files the requests of an engine enter: server, engine and Redis tier in one process.

Writes one JSON object to stdout: for each trip, by kind of thread ("engine", "serving", "storage"), the files whose
functions are called, in order; calls in a row into one file count once. `python -m tests.docs.trace_trips REDIS_URL`.
"""

from __future__ import annotations

import inspect
import json
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import kvframework

CORE = str(Path(kvframework.__file__).parent) + "/"
CHUNK = 256


class Trace:
    """Records calls into files of kvframework and its plugins while `of` is open; other threads count, too."""

    def __init__(self) -> None:
        self.trips: dict[str, dict[str, list[str]]] = {}
        self._current: dict[str, list[str]] | None = None

    @contextmanager
    def of(self, trip: str) -> Iterator[None]:
        self._current = self.trips.setdefault(trip, {})
        try:
            yield
        finally:
            self._current = None

    def __call__(self, frame: FrameType, event: str, _argument: object) -> None:
        files = self._current
        # Bodies of modules and classes run at an import: no part of the way.
        if files is None or event != "call" or not frame.f_code.co_flags & inspect.CO_OPTIMIZED:
            return
        name = frame.f_code.co_filename
        if name.startswith(CORE):
            name = name[len(CORE) :]
        elif "/kvf_" in name:
            name = "kvf_" + name.rpartition("/kvf_")[2]
        else:
            return
        thread = threading.current_thread().name
        if thread in ("kvf-map-ahead", "kvf-records"):  # they work on beside later trips
            return
        where = _kind(thread)
        entered = files.setdefault(where, [])
        if entered[-1:] != [name]:
            entered.append(name)


def _kind(thread: str) -> str:
    if thread == "serving":
        return "serving"
    return "engine" if thread == "MainThread" or thread.startswith("kvf-link") else "storage"


def main(redis_url: str) -> None:
    trace = Trace()
    threading.setprofile(trace)
    sys.setprofile(trace)
    import torch

    import redis
    from kvframework.client import KVClient, RequestHashes, SchedulerAdapter, WorkerAdapter
    from kvframework.config.load import load_config
    from kvframework.registry.registry import PluginRegistry
    from kvframework.server import Server
    from kvframework.wire.messages import Clear, Cleared
    from tests.support.waiting import wait_until

    with tempfile.TemporaryDirectory(prefix="kvf-") as directory:
        settings = (
            f"server.endpoint=ipc://{directory}/s.sock",
            "l1.capacity=4MiB",
            "l2.0.use=redis",
            f"l2.0.url={redis_url}",
        )
        server = Server(load_config(None, settings), PluginRegistry())
        server.bind()
        serving = threading.Thread(target=server.serve_forever, name="serving")
        serving.start()
        try:
            with KVClient(f"ipc://{directory}/s.sock", deadline_scale=20.0) as client:
                assert client.wait_up(20)
                tensors = {f"layer.{index}": torch.zeros((2, 17, 16, 1, 4)) for index in range(2)}
                worker = WorkerAdapter(
                    client,
                    instance_id=1,
                    model_name="m",
                    layout="paged",
                    layout_options={
                        "groups": [
                            {"layers": ["*"], "axes": ["plane", "block", "token", "head", "dim"], "block_size": 16}
                        ]
                    },
                )
                with trace.of("registration"):
                    registered = worker.register_kv_caches(tensors, block_size=16)
                scheduler = SchedulerAdapter(
                    client, model_name="m", namespace=registered.namespace, chunk_tokens=registered.desc.chunk_tokens
                )

                def request(first_token: int = 0) -> RequestHashes:
                    hashes = RequestHashes(client.hasher, CHUNK, request_id="r")
                    hashes.extend(range(first_token, first_token + CHUNK))
                    return hashes

                blocks = [list(range(16))]
                stored_in = redis.Redis.from_url(redis_url)
                # The first one of an instance also makes views of its tensors.
                with trace.of("first STORE"):
                    worker.submit_store(request(CHUNK), 0, CHUNK, blocks).result(20)
                    wait_until(lambda: stored_in.dbsize() >= 2, what="the object and its namespace in Redis")
                with trace.of("STORE"):
                    worker.submit_store(request(), 0, CHUNK, blocks).result(20)
                    wait_until(lambda: stored_in.dbsize() >= 3, what="the object in Redis")
                    # After the tier has answered, the writer unpins the object, and its thread waits for more.
                    wait_until(
                        lambda: "storage/l2/tiers.py" in trace.trips["STORE"]["storage"], what="the writer's end"
                    )
                client.request("CLEAR", Clear(), Cleared)
                with trace.of("LOOKUP"):
                    found = scheduler.wait(scheduler.lookup(request(), wait_s=1.0), 20)
                assert found.hit_tokens == CHUNK
                (loads,) = server.service.storage.tiers._prefetcher.queues
                wait_until(lambda: len(loads.changed._waiters) == loads.at_once + 1, what="the end of the load")
                with trace.of("RETRIEVE"):
                    worker.submit_retrieve(request(), 0, CHUNK, blocks).result(20)
                    finished = server.service.finished._all  # the engine does not wait for the end
                    wait_until(
                        lambda: [each.request for _, each in list(finished.held)[-1:]] == ["RETRIEVE"],
                        what="the COMMIT",
                    )
                scheduler.free(found)
                worker.close()
        finally:
            server.stop()
            serving.join(20)
    json.dump(trace.trips, sys.stdout, indent=1)


if __name__ == "__main__":
    main(sys.argv[1])
