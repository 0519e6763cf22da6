"""The checks of `kvframework doctor`: faults of this machine, installation and configuration. Each check reports its
findings, and changes nothing."""

from kvframework.doctor.checkup import CHECK_S, Checkup, examine

__all__ = ["CHECK_S", "Checkup", "examine"]
