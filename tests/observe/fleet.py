"""A made-up server with a past, behind a real listener: what the page shows of every panel, without a server."""

from __future__ import annotations

import asyncio
import json
import math
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from kvf_observe.app import App
from kvf_observe.http.listener import Listener
from kvf_observe.http.messages import Rights
from kvf_observe.poller import LOADING, History, Observed
from tests.observe.documents import document

GIB = 2**30
CAPACITY = 256 * GIB
MODELS = ("Qwen3-32B", "Llama-3.3-70B-Instruct", "gpt-oss-120b")
DAY_S = 86400.0


def _row(part: float, tokens: float) -> dict[str, float]:
    asked = int(tokens * part)
    hits = int(asked * (0.5 + 0.4 * part))
    return {
        "bytes": int(CAPACITY * 0.9 * part),
        "objects": int(70_000 * part),
        "lookups": asked // 6000,
        "asked_tokens": asked,
        "hit_tokens": hits,
        "stored_objects": int(4e6 * part),
        "evicted_objects": int(3.9e6 * part),
        "prefill_saved_s": hits / 25_000,
    }


def _prefixes(model: str, lookups: int) -> list[dict[str, Any]]:
    """Of which each is asked for half as often as the one before; old ones may have been counted too often."""
    names = ("5c2e9a04", "91d07be3", "0b6f44c8", "e83a1d57", "77f2c0a6")
    return [
        {"model": model, "prefix": name, "count": most, "error": most // 120, "hit_tokens": most * 4096}
        for name, most in ((name, lookups >> place) for place, name in enumerate(names))
    ]


def _latencies(*ms: float) -> dict[str, dict[str, float]]:
    p50, p99, put50, put99 = ms
    return {LOADING: {"count": 9, "p50": p50, "p99": p99}, "put": {"count": 9, "p50": put50, "p99": put99}}


def _loads(number: int, seconds: float) -> dict[str, Any]:
    return {LOADING: {"first": 1e-6, "counts": [number], "sum": seconds}}


def past(age: float, *, models: tuple[str, ...] = MODELS, down: bool = True) -> dict[str, Any]:
    """The document of `age` seconds ago: a server that was started again nine minutes ago, and a tier that went down
    two minutes ago if it is `down`."""
    began = 540.0
    up = began - age if age < began else DAY_S - age
    # Sums over an arrival that swells and ebbs, and over an L1 that fills.
    asked = int(280_000 * (up - 40 * (math.cos(up / 110) - 1) - 2500 * (math.cos(up / 9000) - 1)))
    cold = int(100_000 * (1 - math.exp(-up / 90)) * 90)
    broken = down and age < 120
    lost = int((120 - age) * 20_000) if broken else 0
    l1, l2 = int(asked * 0.61) - cold, int(asked * 0.13) + cold // 2 - lost
    fill = 1 - math.exp(-up / 90)
    used = int(CAPACITY * 0.94 * fill)
    evicted = int(max(up - 200, 0) * 45 - 1500 * (math.cos(max(up - 200, 0) / 60) - 1))
    instances = [
        {
            **document()["instances"][0],
            "instance_id": 1 + number,
            "pid": 4100 + number,
            "model": model,
            "world_size": 4 if number == 1 else 1,
            "rank": 0 if number == 1 else None,
            "transport": "cuda_ipc",
            "is_gpu": True,
            "bytes_per_token": 163840.0,
        }
        for number, model in enumerate(models)
    ]
    tiers = {
        "l2__0__hits": l2 // 256,
        "l2__0__misses": l2 // 600,
        "l2__0__bytes_read": l2 * 160,
        "l2__0__bytes_written": asked * 12,
        "l2__0__usage": {"used_bytes": 730 * GIB, "capacity_bytes": 1024 * GIB},
        "l2__0__latency_ms": _latencies(3.1, 14.2, 5.2, 31.0),
        "l2__1__hits": l2 // 700,
        "l2__1__misses": l2 // 500,
        "l2__1__bytes_read": l2 * 60,
        "l2__1__bytes_written": asked * 4,
        "l2__1__write_pending": 212 if broken else 3,
        "l2__1__latency_ms": _latencies(0.8, 4.9, 1.1, 7.7),
        "l2__0__seconds": _loads(int(up * 3), up * 3 * 0.003 + 0.05 * math.sin(up / 70)),
        "l2__1__seconds": _loads(int(up), up * 0.001 + 0.015 * math.cos(up / 50)),
    }
    if broken:
        error = "cannot connect to 10.0.4.17:6379: Connection refused"
        tiers |= {
            "l2__1__state": "open",
            "l2__1__circuits__read": "open",
            "l2__1__circuits__write": "open",
            "l2__1__state_s": 120 - age,
            "l2__1__last_error": error,
        }
    idle = [0, 0, 3, 9, 40, 120, 310, 620, 980, 1400, 1100, 540, 210, 60, 12]
    return document(
        server__boot_id="1" * 32 if age < began else "0" * 32,
        server__version="0.3.0",
        server__uptime_s=up,
        server__endpoint="ipc:///run/kvframework/server.sock",
        server__tcp="tcp://10.0.4.11:5580",
        instances=instances,
        lookups={
            "lookups": asked // 6000,
            "asked_tokens": asked,
            "hit_tokens": l1 + l2,
            "unknown_namespace": 0,
            "prefill_saved_s": (l1 + l2) / 25_000,
            "last_hour": {"prefill_saved_s": min(up, 3600.0) / up * (l1 + l2) / 25_000},
            "by_model": {models[0]: {"lookups": 1, "asked_tokens": asked, "l1_tokens": l1, "l2_tokens": l2}},
            "misses": {"never_stored": 8120, "evicted": 2310, "tier_down": 210, "other_salt": 77},
        },
        l1__capacity_bytes=CAPACITY,
        l1__ready_bytes=CAPACITY,
        l1__used_bytes=used,
        l1__free_bytes=CAPACITY - used,
        l1__quarantined_bytes=int(0.02 * CAPACITY * fill),
        l1__objects=int(52_000 * fill),
        l1__evictions=evicted,
        l1__evicted={"room": int(evicted * 0.91), "watermark": 0, "tenant": int(evicted * 0.09), "hinted": 0},
        l1__evicted_idle_s={"first": 0.1, "counts": idle, "sum": 1e5},
        l1__wanted_after_eviction_s={"first": 0.1, "counts": [value // 3 for value in idle], "sum": 1e5},
        l1__more_capacity=[
            {"capacity_bytes": round(CAPACITY * 2 ** (step / 4)), "hit_rate": 0.81 - 0.25 * math.exp(-step / 2.6)}
            for step in range(11)
        ],
        use={
            "models": {model: _row(part, asked) for model, part in zip(models, (0.55, 0.3, 0.15), strict=False)},
            "tenants": {"search": _row(0.5, asked), "assistant": _row(0.4, asked), "other": _row(0.1, asked)},
            "engines": {f"vllm ({4100 + number})": _row(part, asked) for number, part in enumerate((0.55, 0.3, 0.15))},
            "hot_prefixes": _prefixes(models[0], 9_600),
        },
        **tiers,
    )


class Fleet:
    """A context manager; `url` is where the page is. `status` makes a document of its age in seconds, up to `span`."""

    def __init__(self, status: Callable[[float], dict[str, Any]] = past, *, span: float = DAY_S) -> None:
        self._history = History()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self._ready = threading.Event()
        self.url = ""
        for age in (*range(86_340, 960, -60), *range(960, -1, -1)):
            if age <= span:
                made = status(float(age))
                self._latest = Observed(made, b"", "", 0.001, 0.0, time.time() - age, 1, 0)
                self._history.add(self._latest)
        self._latest = self._latest._replace(raw=json.dumps(made).encode())

    def __enter__(self) -> Fleet:
        self._thread.start()
        assert self._ready.wait(60)
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(60)

    async def _run(self) -> None:
        def latest() -> Observed:
            return self._latest._replace(at=time.monotonic())

        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        listener = Listener(App(latest, self._history, rights=Rights(lambda: "", loopback=True)).answer)
        host, port = await listener.start("127.0.0.1", 0)
        self.url = f"http://{host}:{port}"
        self._ready.set()
        await self._stop.wait()
        await listener.stop()
