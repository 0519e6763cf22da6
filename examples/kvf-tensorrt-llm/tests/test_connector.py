"""The connector's logic with stand-ins for TensorRT-LLM, and a real server: what one engine stored, another one loads.

This proves nothing about TensorRT-LLM itself.
"""

from __future__ import annotations

import copy
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvframework.api.futures import Promise
from kvframework.errors import DeadlineExceeded, RequestError

BLOCK, CHUNK, BLOCKS = 8, 16, 32


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    # Not below pytest's own folder: the path of a socket must be short.
    with tempfile.TemporaryDirectory(prefix="kvf-") as folder:
        address = f"ipc://{folder}/s.sock"
        command = [str(Path(sys.executable).with_name("kvframework")), "serve"]
        for setting in (f"server.endpoint={address}", f"server.chunk_size={CHUNK}", "l1.capacity=16MiB"):
            command += ["--set", setting]
        with subprocess.Popen(command) as server:
            yield address
            server.terminate()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    return tmp_path


class Stream:
    def synchronize(self) -> None: ...


class Engine:
    """One rank: a pool, and the calls of TensorRT-LLM's executor in its order."""

    def __init__(self, model: Path, **arguments: Any) -> None:
        from kvf_tensorrt_llm.connector import KvFrameworkScheduler, KvFrameworkWorker

        settings = SimpleNamespace(tokens_per_block=BLOCK)
        self.arguments = SimpleNamespace(model=model, kv_cache_config=settings, tensor_parallel_size=1, **arguments)
        self.worker = KvFrameworkWorker(self.arguments)
        self.pool = torch.zeros(BLOCKS, 2, 2, BLOCK * 4, dtype=torch.float16)
        self.worker.register_kv_caches(self.pool)
        self.scheduler = KvFrameworkScheduler(self.arguments)
        self._free = list(range(BLOCKS))

    def run(self, number: int, tokens: list[int], own: int = 0, step: int = 1 << 20, new: int = 0, **named: Any) -> Any:
        """Run a request, `step` tokens of its prompt at a time, then `new` tokens one by one; return what was loaded,
        and the blocks of all tokens."""
        request = SimpleNamespace(request_id=number, get_tokens=lambda _beam: tokens, **named)
        loaded, later = self.scheduler.get_num_new_matched_tokens(request, own)
        assert later is False
        blocks = [self._free.pop() for _ in range(-(-(len(tokens) + new) // BLOCK))]
        self.scheduler.update_state_after_alloc(request, blocks)
        done, first = own + loaded, True
        written: list[int] = []
        while done < len(tokens) + new:
            count = min(step, len(tokens) - done) if done < len(tokens) else 1
            given = tokens if first else [(number + done) % 97] if done >= len(tokens) else []
            data = SimpleNamespace(
                request_id=number,
                new_tokens=given,
                new_block_ids=blocks if first else [],
                computed_position=own if first else done,
                num_scheduled_tokens=count,
            )
            output = SimpleNamespace(new_requests=[data] if first else [], cached_requests=[] if first else [data])
            plan = copy.deepcopy(self.scheduler.build_connector_meta(output))  # ranks get copies, by MPI
            self.worker.bind_connector_meta(plan)
            self.worker.start_load_kv(Stream())
            written += given
            for at in range(done, done + count):
                token = ([*tokens, *written[len(tokens) :]])[at] if at < len(written) else 0
                self.pool[blocks[at // BLOCK]].view(2, 2, BLOCK, 4)[:, :, at % BLOCK] = token * (at + 1) % 2048
            self.worker.wait_for_save(Stream())
            assert self.worker.get_finished([], []) == ([], [])
            done, first = done + count, False
        assert self.scheduler.request_finished(request, blocks) is False
        return loaded, blocks

    def close(self) -> None:
        if self.worker.adapter:
            self.worker.adapter.close()
        self.worker.client.close()


@pytest.fixture
def engines(endpoint: str, model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("KVFRAMEWORK_ENDPOINT", endpoint)
    made: list[Engine] = []

    def make(**arguments: Any) -> Engine:
        made.append(Engine(model, **arguments))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def prompt(tokens: int, seed: int) -> list[int]:
    return torch.randint(1, 97, (tokens,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("step", [1 << 20, 7])
def test_another_engine_loads_what_was_computed_a_part_at_a_time(engines: Any, step: int) -> None:
    tokens = prompt(4 * CHUNK + 1, seed=step)
    first, second = engines(), engines()
    loaded, blocks = first.run(1, tokens, step=step)
    assert loaded == 0
    again, others = second.run(2, tokens, step=step)
    assert again == 4 * CHUNK
    whole = 4 * CHUNK // BLOCK
    assert torch.equal(first.pool[blocks[:whole]], second.pool[others[:whole]])
    assert first.pool[blocks[:whole]].any()


def test_a_load_begins_behind_what_the_device_has(engines: Any) -> None:
    tokens = prompt(3 * CHUNK + 5, seed=40)
    first, second = engines(), engines()
    _, blocks = first.run(1, tokens)
    own = CHUNK + BLOCK
    loaded, others = second.run(2, tokens, own=own)
    assert loaded == 2 * CHUNK - BLOCK
    assert not second.pool[others[: own // BLOCK]].any()
    part = slice(own // BLOCK, 3 * CHUNK // BLOCK)
    assert torch.equal(first.pool[blocks[part]], second.pool[others[part]])
    assert second.run(3, tokens, own=3)[0] == 0


def test_generated_tokens_are_stored_too(engines: Any) -> None:
    tokens = prompt(CHUNK + 3, seed=41)
    first, second = engines(), engines()
    first.run(5, tokens, new=CHUNK)
    answer = [(5 + at) % 97 for at in range(len(tokens), len(tokens) + CHUNK)]
    assert second.run(6, [*tokens, *answer])[0] == 2 * CHUNK


def test_tenants_adapters_and_images_share_nothing(engines: Any) -> None:
    tokens, engine = prompt(CHUNK + 1, seed=42), engines()
    engine.run(1, tokens, cache_salt_id=0)
    assert engine.run(2, tokens, cache_salt_id=0)[0] == CHUNK
    assert engine.run(3, tokens, cache_salt_id=7, lora_task_id=0)[0] == 0
    assert engine.run(4, tokens, cache_salt_id=7, multimodal_hashes=[[1]])[0] == 0
    assert engine.run(5, tokens, cache_salt_id=7, py_multimodal_data={"image": 1})[0] == 0
    assert engine.run(6, tokens, cache_salt_id=7, prompt_vocab_size=8)[0] == 0
    assert engine.run(7, tokens)[0] == 0
    assert engine.run(8, tokens, cache_salt_id=7)[0] == 0


def test_other_weights_share_nothing(engines: Any, model: Path) -> None:
    tokens = prompt(2 * CHUNK + 1, seed=43)
    engines().run(1, tokens)
    (model / "model.safetensors").write_bytes(b"others")
    assert engines().run(2, tokens)[0] == 0


def test_a_promised_load_that_fails_is_not_taken_for_kv(engines: Any) -> None:
    from kvf_tensorrt_llm.plan import Op, Plan

    engine = engines()
    engine.worker.bind_connector_meta(Plan(loads=[Op("9", bytes(32), "", 0, CHUNK, (0, 1))]))
    with pytest.raises(RequestError, match="load of request 9 failed"):
        engine.worker.start_load_kv(Stream())


def test_a_load_that_takes_too_long_writes_nothing_afterwards(engines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvf_tensorrt_llm.plan import Op, Plan

    engine, slow = engines(), Slow()
    monkeypatch.setattr("kvf_tensorrt_llm.connector.TRANSFER_S", 0.01)
    monkeypatch.setattr(engine.worker.adapter, "submit_retrieve", lambda *_given, **_more: slow)
    engine.worker.bind_connector_meta(Plan(loads=[Op("9", bytes(32), "", 0, CHUNK, (0, 1))]))
    with pytest.raises(DeadlineExceeded):
        engine.worker.start_load_kv(Stream())
    assert slow.query()


class Slow(Promise[Any]):
    """A transfer that ends when it is cancelled."""

    def cancel(self) -> None:
        self.set_result(None)


def test_without_a_server_everything_is_computed(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFRAMEWORK_ENDPOINT", f"ipc://{tmp_path}/none")
    monkeypatch.setattr("kvf_tensorrt_llm.connector.CONNECT_S", 0.1)
    engine = Engine(model)
    assert engine.run(1, prompt(40, seed=44))[0] == 0
    engine.close()


def test_what_cannot_be_named_is_refused(tmp_path: Path, model: Path) -> None:
    with pytest.raises(RequestError, match="no folder with weights"):
        Engine(tmp_path / "organisation" / "model")
    with pytest.raises(RequestError, match="pipeline"):
        Engine(model, pipeline_parallel_size=2)
