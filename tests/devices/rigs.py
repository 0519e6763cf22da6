"""Rigs for the kit's own tests, which any process can make: the example, and others registered by module."""

from __future__ import annotations

import sys
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "kvf-simdev"
if str(EXAMPLE) not in sys.path:
    sys.path.insert(0, str(EXAMPLE))

import kvf_simdev  # noqa: E402

from kvf_dev.testing.accelerator.rig import SimulatedRig  # noqa: E402


def simdev(
    node: str, module: str = "kvf_simdev", transport: str = "simdev", device: int = 0, **options: object
) -> SimulatedRig:
    """`options` are the transport's, beside the node."""
    runtime = kvf_simdev.runtime(node)
    return SimulatedRig(runtime, node, transport, plugins=(module,), options={"node": node, **options}, device=device)
