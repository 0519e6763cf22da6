"""A transport of the simulated accelerator, as a plugin module: its copier starts, and opens memory, only as files in
the node's directory let it."""

from __future__ import annotations

import time
from pathlib import Path

from kvf_simdev import SimCopier, SimOptions, create_engine, runtime

from kvf_devices import Allocation, Arena, DeviceTransportProvider
from kvframework.api.plugin import hookimpl
from kvframework.errors import DeviceError

STARTS_LATER, OPENS_NOTHING = "starts-later", "opens-nothing"


class SlowCopier(SimCopier):
    node: Path

    def open(self, allocation: Allocation) -> int:
        if (self.node / OPENS_NOTHING).exists():
            raise DeviceError("it is not shared", where="acme.open")
        return super().open(allocation)


def create_slow_copier(options: SimOptions, device: str, arena: Arena) -> SlowCopier:
    while (Path(options.node) / STARTS_LATER).exists():
        time.sleep(0.01)
    made = SlowCopier(runtime(options.node), device, arena)
    made.node = Path(options.node)
    return made


@hookimpl
def kvf_transports() -> list[DeviceTransportProvider[SimOptions]]:
    return [
        DeviceTransportProvider(
            name="slow",
            summary="waits",
            options=SimOptions,
            create_engine=create_engine,
            create_copier=create_slow_copier,
        )
    ]
