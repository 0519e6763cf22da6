"""The conformance kit's access to the simulated accelerator: it acts as an engine, in any process."""

import kvf_simdev

from kvf_dev.testing.accelerator.rig import SimulatedRig


def make(node: str) -> SimulatedRig:
    return SimulatedRig(kvf_simdev.runtime(node), node, "simdev")
