"""One rank of an engine as a process: `python -m tests.core.shards.dying_rank ENDPOINT RANK` stores the first chunk of
the prompt, and is killed in the copy of the second one."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from kvf_cpu_gather.kernel import NativeCopy, wrapping_copies
from kvframework.client import KVClient, ModelPart
from tests.core.shards.model import BLOCK, CHUNK, TOKENS, Model, Rank, hashed

TP = 2
MODEL = Model(heads=4)


def main(endpoint: str, rank: int) -> None:
    dying = False

    def wrap(copy: NativeCopy) -> NativeCopy:
        def counted(*arguments: Any) -> int:
            if dying:
                os.kill(os.getpid(), signal.SIGKILL)
            return copy(*arguments)

        return counted

    with wrapping_copies(wrap), KVClient(endpoint, deadline_scale=20.0) as client:
        content = MODEL.content(1)
        worker = Rank(
            client, 1 + rank, MODEL, ModelPart(MODEL.heads, rank, TP), "NHD", content, stage_layers=MODEL.layers
        ).worker
        for start, end in ((0, CHUNK), (CHUNK, TOKENS)):
            blocks = list(range(start // BLOCK, end // BLOCK))
            dying = start > 0
            done = worker.submit_store(hashed(client, range(TOKENS)), start, end, [blocks]).result(60)
            assert done.stored == 2, done
    raise SystemExit("it should have died")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
