"""Two workers of one model name whose KV differs never see each other's objects, and whoever looks sees why: the status
shows both namespaces.

What makes the bytes differ makes the namespace differ; what only lies elsewhere in the engine's memory does not, since
objects are canonical: see `layouts/test_identity.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from kvframework.client import KVClient, RequestHashes  # noqa: E402
from kvframework.wire import messages as m  # noqa: E402
from tests.support.engines import PagedEngine  # noqa: E402
from tests.support.server_process import ServerProcess, server_fixture  # noqa: E402

pytestmark = pytest.mark.torch


server = server_fixture(capacity="192MiB", scope="module")


@pytest.fixture
def clients(server: ServerProcess) -> Iterator[tuple[KVClient, KVClient]]:
    """Of two sessions, as two engine processes have."""
    with server.client() as cleaner, server.engine_client() as one, server.engine_client() as two:
        cleaner.call("CLEAR", m.Clear())
        yield one, two


class Worker(PagedEngine):
    """Its memory holds one value everywhere."""

    def __init__(
        self,
        client: KVClient,
        instance_id: int,
        value: float,
        *,
        dtype: torch.dtype | None = None,
        shape: tuple[int, ...] = (2, -1, 16, 1, 2),
        lora: bytes = b"",
        **options: Any,
    ) -> None:
        self.lora, self.value = lora, value
        self.blocks = 36
        sizes = [self.blocks if size < 0 else size for size in shape]
        kv = {f"l{index}": torch.full(sizes, value).to(dtype or torch.float16) for index in range(2)}
        super().__init__(client, instance_id, kv=kv, layout=options.pop("layout", "paged"), **options)
        self.namespace = self.registration.namespace
        self.per_chunk = self.chunk // 16

    def asked(self, token: int) -> RequestHashes:
        request = RequestHashes(self.client.hasher, self.chunk, request_id="same")
        request.extend([token] * self.chunk, {0: self.lora} if self.lora else None)
        return request

    def store(self, token: int) -> bool:
        return self.worker.submit_store(self.asked(token), 0, self.chunk, [list(range(self.per_chunk))]).result(30)

    def hit(self, token: int) -> int:
        return super().hit(self.asked(token))

    def load(self, token: int) -> bool:
        """Into other blocks than it stores from; afterwards they hold its own value, whatever came."""
        blocks = list(range(self.blocks - self.per_chunk, self.blocks))
        for tensor in self.kv.values():
            tensor.zero_()
        loaded = self.worker.submit_retrieve(self.asked(token), 0, self.chunk, [blocks]).result(30)
        kept = {name: tensor.clone() for name, tensor in self.kv.items()}
        for name, tensor in self.kv.items():
            own = torch.full_like(tensor, self.value)
            if loaded:
                assert int((kept[name] == own).sum()) == own.numel() * self.per_chunk // self.blocks, "foreign bytes"
            else:
                assert not kept[name].any(), "a miss wrote something"
            tensor.copy_(own)
        return loaded


# Each way to another name is that of `layouts/`, `client/test_naming.py` and `server/test_misses.py`.
VARIANTS: dict[str, dict[str, Any]] = {
    "dtype of the same size": {"dtype": torch.bfloat16},
    "layout: opaque blocks": {
        "shape": (-1, 16, 2, 2),
        "layout": "opaque",
        "layout_options": {"packing": "amx", "block_axis": 0},
    },
    "quantisation": {"quantization": "fp8-kv"},
    "LoRA of a request": {"lora": b"adapter 7"},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_workers_that_differ_never_meet(
    server: ServerProcess, clients: tuple[KVClient, KVClient], variant: str
) -> None:
    one = Worker(clients[0], 1, 1.0)
    two = Worker(clients[1], 2, 2.0, **VARIANTS[variant])
    assert one.store(11)
    assert two.hit(11) == 0
    assert not two.load(11)
    assert two.store(12)
    assert one.hit(12) == 0
    assert not one.load(12)
    # The same tokens from both: each has its own.
    assert two.store(11)
    assert one.store(12)
    for token in (11, 12):
        assert one.hit(token) == one.chunk
        assert two.hit(token) == two.chunk
        assert one.load(token)
        assert two.load(token)

    if variant == "LoRA of a request":
        assert one.namespace == two.namespace, "one worker serves many adapters: it is the content that differs"
        return
    assert one.namespace != two.namespace
    with server.client() as watcher:
        assert watcher.status()["namespaces"] == sorted([one.namespace.hex(), two.namespace.hex()])
