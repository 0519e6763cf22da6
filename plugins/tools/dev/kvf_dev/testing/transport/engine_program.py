"""An engine process of the transport kit: RIG ENDPOINT INSTANCE CASE. Takes one JSON list a line and answers with one.

`["store", seed]` and `["load", seed]` wait for the result, `["begin", "store" or "load", seed]` does not. `["check",
instance]` returns the differences after a load of objects that another instance of the same case has stored.
"""

from __future__ import annotations

import json
import sys

from kvf_dev.testing.transport.cases import CASES
from kvf_dev.testing.transport.engine import PATIENCE_S, KitEngine
from kvf_dev.testing.transport.node import client_of, rig_told


def main() -> None:
    rig = rig_told(sys.argv[1])
    with client_of(rig, sys.argv[2]) as client:
        engine = KitEngine(rig, client, int(sys.argv[3]), CASES[sys.argv[4]], seed=int(sys.argv[3]))
        _say("registered")
        for line in sys.stdin:
            _say(json.dumps(_do(engine, json.loads(line))))
        engine.close()
    rig.close()


def _do(engine: KitEngine, words: list[object]) -> object:
    if words[0] == "begin":
        _submit(engine, str(words[1]), int(str(words[2])))
        return True
    if words[0] == "check":
        origin = int(str(words[1]))
        engine.expect_loaded(engine.model_of(origin), engine.source(seed=origin), engine.target())
        return engine.differences()
    return _submit(engine, str(words[0]), int(str(words[1]))).result(PATIENCE_S).ok


def _submit(engine: KitEngine, what: str, seed: int):  # type: ignore[no-untyped-def]
    request = engine.request(seed)
    return engine.store(request, engine.source()) if what == "store" else engine.load(request, engine.target())


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
