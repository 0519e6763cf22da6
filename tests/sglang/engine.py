"""One SGLang engine in this process: answers prompts and tells what it saw as one JSON line each on stdout.

Run as `python -m tests.sglang.engine` with an `Order` as JSON on stdin; stderr has SGLang's log.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from tests.sglang.engine_order import Ask, Order, settings_of
from tests.sglang.standins import everything

# Also in the processes that SGLang starts: they import this module first.
everything.install()


def main() -> None:
    given = json.loads(sys.stdin.read())
    order = Order(**{**given, "asks": [Ask(**ask) for ask in given["asks"]]})
    events, sys.stdout = os.fdopen(os.dup(1), "w"), sys.stderr
    os.dup2(2, 1)

    def tell(**fields: Any) -> None:
        events.write(json.dumps(fields) + "\n")
        events.flush()

    import sglang

    engine = sglang.Engine(**settings_of(order))
    manager, run = engine.tokenizer_manager, engine.loop.run_until_complete
    tell(event="ready")
    try:
        for ask in order.asks:
            if ask.wait_file:
                tell(event="waiting")
                _wait(ask.wait_file)
            if ask.flush:
                assert engine.flush_cache().success
            if ask.clear:
                assert run(manager.clear_hicache_storage()).success
            if ask.update:
                assert engine.update_weights_from_disk(ask.update)[0]
            begun = time.perf_counter()
            answer = run(anext(manager.generate_request(_request(ask), None)))[0]
            info = answer["meta_info"]
            tell(
                event="answer",
                tokens=answer["output_ids"],
                cached=info.get("cached_tokens"),
                details=info.get("cached_tokens_details") or {},
                wall=time.perf_counter() - begun,
            )
        if order.hold_file:
            _wait(order.hold_file)
    finally:
        with contextlib.suppress(Exception):
            engine.shutdown()


def _wait(file: str) -> None:
    deadline = time.monotonic() + 300
    while not Path(file).exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _request(ask: Ask) -> Any:
    from sglang.srt.managers.io_struct import GenerateReqInput

    return GenerateReqInput(
        input_ids=[ask.prompt],
        sampling_params={"temperature": 0.0, "max_new_tokens": ask.tokens, "ignore_eos": True},
        cache_salt=ask.salt or None,
    )


if __name__ == "__main__":
    main()
