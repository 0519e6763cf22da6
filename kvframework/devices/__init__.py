"""What stands above every accelerator's driver: lending memory, planning, copier processes, completion."""

from kvframework.devices.engine_half import DeviceTransfer
from kvframework.devices.server_half import DeviceServerTransport

__all__ = ["DeviceServerTransport", "DeviceTransfer"]
