"""The part above every accelerator's driver: export of memory, copier processes, completion. A vendor's package imports
what is here, implements `EngineDriver` and `CopierDriver`, and its hook returns a `DeviceTransportProvider`."""

from kvf_devices.driver import MAX_HANDLE_BYTES, Allocation, CopierDriver, DeviceOptions, EngineDriver, Exported
from kvf_devices.provider import DeviceTransportProvider
from kvframework.api.transport import Arena

__all__ = [
    "MAX_HANDLE_BYTES",
    "Allocation",
    "Arena",
    "CopierDriver",
    "DeviceOptions",
    "DeviceTransportProvider",
    "EngineDriver",
    "Exported",
]
