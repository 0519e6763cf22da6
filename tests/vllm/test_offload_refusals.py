"""What `KvFrameworkOffloading` refuses at the engine's start: a typed error that says what to change. The server is
real, the configurations are vLLM's own, and no engine needs to run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from kvframework.client import KvIdentity
from kvframework.errors import BadLayout, ConfigFieldError, KVFrameworkError
from tests.support.processes import ran
from tests.support.server_process import ServerProcess, server_fixture
from tests.support.waiting import wait_until
from tests.vllm.model import cached

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]

BLOCKS = 64
server = server_fixture(capacity="1MiB", scope="module")


def made(server: ServerProcess, extra: dict[str, Any] | None = None, **engine: Any) -> Any:
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import init_none_hash
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor

    from kvf_vllm import transfer_config
    from kvf_vllm.offloading.connector import KvFrameworkOffloading

    transfer = transfer_config(
        {"kvframework.endpoint": server.endpoint, **(extra or {})}, connector="KvFrameworkOffloading"
    )
    arguments: dict[str, Any] = {"dtype": "float32", "max_model_len": 512, "block_size": 16, **engine}
    config = EngineArgs(
        model=str(cached("tiny")), skip_tokenizer_init=True, kv_transfer_config=transfer, **arguments
    ).create_engine_config()
    init_none_hash(get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo))
    spec = FullAttentionSpec(
        block_size=config.cache_config.block_size, num_kv_heads=2, head_size=16, dtype=torch.float32
    )
    size = spec.page_size_bytes * BLOCKS
    caches = KVCacheConfig(
        BLOCKS, [KVCacheTensor(size, ["layer"], size, spec.page_size_bytes)], [KVCacheGroupSpec(["layer"], spec)]
    )
    with set_current_vllm_config(config):
        return KvFrameworkOffloading(config, KVConnectorRole.SCHEDULER, caches)


def refused(server: ServerProcess, error: type[KVFrameworkError], *words: str, **named: Any) -> None:
    with pytest.raises(error) as caught:
        made(server, **named).shutdown()
    for word in (*words, "hint:"):
        assert word in str(caught.value)


def test_a_sound_configuration_is_taken(server: ServerProcess) -> None:
    connector = made(server)
    try:
        assert connector._client.wait_up(60)
    finally:
        connector.shutdown()


def test_chunks_that_are_no_whole_blocks(server: ServerProcess) -> None:
    refused(server, ConfigFieldError, "multiple of", "Use 32", extra={"block_size": 24})
    refused(server, ConfigFieldError, "greater than 0", extra={"blocks_per_chunk": 0})
    refused(server, ConfigFieldError, "invalid literal", extra={"blocks_per_chunk": "many"})
    refused(server, ConfigFieldError, extra={"blocks_per_chunk": []})
    refused(server, ConfigFieldError, "only one of", extra={"blocks_per_chunk": 2, "block_size": 32})


def test_loads_of_vllms_own_within_the_step(server: ServerProcess) -> None:
    refused(server, ConfigFieldError, "sync_load_budget_bytes", "kvframework.load", extra={"sync_load_budget_bytes": 1})


def test_hashes_that_differ_in_each_process(server: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    for algorithm in ("xxhash", "xxhash_cbor"):
        refused(
            server, ConfigFieldError, algorithm, "sha256_cbor", "PYTHONHASHSEED", prefix_caching_hash_algo=algorithm
        )
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    made(server, prefix_caching_hash_algo="xxhash").shutdown()


def test_an_arena_that_is_too_small(server: ServerProcess, caplog: pytest.LogCaptureFixture) -> None:
    from kvf_vllm.offloading.checks import check_room

    refused(server, BadLayout, "l1.capacity", "1.0 MiB", extra={"blocks_per_chunk": 512})
    refused(server, BadLayout, "1.0 GiB", "blocks_per_chunk", extra={"blocks_per_chunk": 1 << 20})
    caplog.clear()
    made(server, max_model_len=512).shutdown()
    assert "l1.capacity" not in caplog.text
    connector = made(server, max_model_len=8192)
    assert "one request of 8192 tokens (max_model_len) needs" in caplog.text
    assert "l1.capacity" in caplog.text
    # Of two groups one object fits, but not one of each.
    with pytest.raises(BadLayout, match="one chunk of this model has"):
        check_room(connector._client, 600 << 10, [(16, 0), (16, 64)], 16)
    connector.shutdown()


def test_engines_of_one_model_with_other_chunks_share_no_object(server: ServerProcess) -> None:
    from kvf_vllm.offloading.messages import Laid

    namespaces = []
    for extra, engine in (
        ({"blocks_per_chunk": 4}, {}),
        ({"blocks_per_chunk": 8}, {}),
        ({"blocks_per_chunk": 8}, {"block_size": 32}),
        ({"blocks_per_chunk": 4}, {}),
    ):
        connector = made(server, extra=extra, **engine)
        spec = connector._spec
        laid = Laid("tiny", b"", spec.unit_tokens, 1, identity=KvIdentity("tiny", "r"), slot_bytes=spec.slot_bytes)
        instance = connector._register([laid])
        wait_until(lambda: instance.is_ready, 60, "the registration")  # noqa: B023 - called at once
        namespaces.append(instance._namespace)
        connector.shutdown()
    assert len(set(namespaces[:3])) == 3
    assert namespaces[3] == namespaces[0]


def test_a_vllm_of_another_interface(tmp_path: Path) -> None:
    program = "import vllm; vllm.__version__ = '0.29.1'; import kvf_vllm.offloading.connector"
    tried = ran(sys.executable, "-c", program, code=1, timeout=300)
    assert "VersionMismatch" in tried.stderr
    assert "vLLM 0.29.1" in tried.stderr
    assert "hint: install a supported vLLM" in tried.stderr
