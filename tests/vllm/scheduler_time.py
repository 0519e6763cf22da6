"""The processor time that a connector takes of vLLM's scheduler thread, without a model:

python -m tests.vllm.scheduler_time TRACE [CONNECTOR]

vLLM's scheduler, the connector and the server are real; a step sleeps for as long as a small model would compute. The
load is that of `kvframework bench serving` with one engine. Compare two commits by runs at the same time.
"""

from __future__ import annotations

import functools
import inspect
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from kvf_plan.trace.reading import open_trace
from kvframework_bench.serving.load import LoadShape, make_load, token_ids
from tests.support.server_process import ServerProcess
from tests.vllm.modelless import Cache, Engine
from tests.vllm.test_offload_kinds_bytes import kind

BLOCK, STEP_S, TOKEN_S = 128, 0.004, 60e-6


def timed(connector: type, base: type, taken: dict[str, list[int]]) -> None:
    """Note the nanoseconds of each call of a method in the scheduler's role."""
    nested = False
    for name, method in inspect.getmembers(connector, inspect.isfunction):
        if name.startswith("_") or method is getattr(base, name, None):
            continue

        def call(self: Any, *given: Any, _name: str = name, _method: Any = method, **named: Any) -> Any:
            nonlocal nested
            if nested or self._role.name != "SCHEDULER":
                return _method(self, *given, **named)
            nested, began = True, time.thread_time_ns()
            try:
                return _method(self, *given, **named)
            finally:
                taken[_name].append(time.thread_time_ns() - began)
                nested = False

        setattr(connector, name, functools.wraps(method)(call))


def main(trace: Path, name: str) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    import kvf_vllm
    from kvf_vllm.connector import KvFrameworkConnector
    from kvf_vllm.offloading.connector import KvFrameworkOffloading

    taken: dict[str, list[int]] = defaultdict(list)
    timed({c.__name__: c for c in (KvFrameworkConnector, KvFrameworkOffloading)}[name], KVConnectorBase_V1, taken)
    transfer = kvf_vllm.transfer_config
    kvf_vllm.transfer_config = lambda extra, **_: transfer(extra, connector=name)
    opened = open_trace(trace)
    asks = make_load(opened, opened.header.chunk_tokens, LoadShape(requests=60, seconds=25))
    cache = Cache(
        kind("FullAttentionSpec", 4, block_size=BLOCK),
        engine={"block_size": BLOCK, "num_gpu_blocks_override": 48, "max_model_len": 4200},
    )
    with ServerProcess(capacity="1GiB") as server:
        engine = Engine(cache, server.endpoint, {"kvframework.deadline_scale": 1.0}, lambda _config: None)
        workers, starts = engine.executor, {}
        execute = workers.execute_model

        def compute(_worker: Any, request_id: str, start: int, _tokens: int) -> None:
            workers.loaded.setdefault(request_id, None)
            starts.setdefault(request_id, start)

        def executed(plan: Any, non_block: bool = False) -> Any:
            output, tokens = execute(plan, non_block), sum(plan.num_scheduled_tokens.values())
            if tokens:
                time.sleep(STEP_S + TOKEN_S * tokens)
            return output

        workers._compute, workers.execute_model = compute, executed
        for _ in range(2):
            engine.answer(0, [5] * 1000)
            time.sleep(1)
        taken.clear()
        starts.clear()
        prompts = [token_ids(ask, seed=1, vocabulary=32000) for ask in asks]
        began, asked = time.monotonic(), 0
        while asked < len(asks) or engine.core.scheduler.has_requests():
            while asked < len(asks) and asks[asked].at <= time.monotonic() - began:
                engine.ask(asked + 1, prompts[asked], asks[asked].answer_tokens)
                asked += 1
            if not engine.core.scheduler.has_requests():
                time.sleep(max(asks[asked].at - (time.monotonic() - began), 0.0))
                continue
            engine.core.step()
        for method, each in sorted(taken.items(), key=lambda item: -sum(item[1])):
            each.sort()
            print(
                f"{method:35} {sum(each) / len(asks) / 1e3:7.1f} us a request, {len(each) / len(asks):5.1f} calls, "
                f"a call {each[len(each) // 10] / 1e3:.1f} to {each[-1 - len(each) // 10] / 1e3:.1f} us"
            )
        hit = sum(starts.values()) / sum(map(len, prompts))
        total = sum(map(sum, taken.values())) / len(asks) / 1e6
        print(f"{name}: {total:.2f} ms a request, {hit:.1%} of the tokens not computed")
        engine.core.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "KvFrameworkOffloading")
