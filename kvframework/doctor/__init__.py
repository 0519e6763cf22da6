"""What is wrong with this machine, installation and configuration, before a server is blamed: `kvframework doctor`.
Each check says what it saw, and changes nothing."""

from kvframework.doctor.checkup import CHECK_S, Checkup, examine

__all__ = ["CHECK_S", "Checkup", "examine"]
