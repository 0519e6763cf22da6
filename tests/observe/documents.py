"""Status documents for tests: one of a server where all is well, and copies of it in which something is not."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

from kvf_observe.poller import Observed
from kvframework.service.health import problems

NOW = 1000.0
_HEALTHY = json.loads((Path(__file__).parent / "status.json").read_text())


def document(**places: Any) -> dict[str, Any]:
    """The document of a healthy server, with values put in at places such as `l1__counters__dropped`; numbers are
    indices of lists. Its problems are those that a server would find in it."""
    made = copy.deepcopy(_HEALTHY)
    for place, value in places.items():
        *path, last = place.split("__")
        node = made
        for step in path:
            node = node[int(step)] if isinstance(node, list) else node.setdefault(step, {})
        if isinstance(node, list):
            node[int(last)] = value
        else:
            node[last] = value
    made["problems"] = problems(made)
    return made


def answered(status: dict[str, Any] | None = None, **changed: Any) -> Observed:
    found = status or document()
    return Observed(found, json.dumps(found).encode(), "", 0.001, NOW, 1.8e9, 1, 0)._replace(**changed)


def unanswered(error: str = "[run.server_gone] no server answers", **changed: Any) -> Observed:
    return Observed(None, b"", error, None, NOW, 1.8e9, 1, 1)._replace(**changed)
