"""How the conformance kit uses the simulated accelerator as an engine would, in whatever process."""

import kvf_simdev

from kvframework.testing.accelerator.rig import SimulatedRig


def make(node: str) -> SimulatedRig:
    return SimulatedRig(kvf_simdev.runtime(node), node, "simdev")
