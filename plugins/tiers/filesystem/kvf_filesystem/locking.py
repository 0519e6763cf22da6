"""The lock of the folder, on its marker file: taken by a server, and looked at by the checks before one starts."""

from __future__ import annotations

import fcntl
import logging
import os

from kvf_filesystem.options import FilesystemOptions
from kvframework.errors import ConfigFieldError

_log = logging.getLogger(__name__)


def lock(marker_fd: int, options: FilesystemOptions, path: str, where: str) -> None:
    """Locks the folder against a second server that is configured to use it alone. Nothing else relies on this.
    Raises `ConfigFieldError`."""
    try:
        fcntl.flock(marker_fd, (fcntl.LOCK_SH if options.shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        raise _in_use(path, _holders(marker_fd, options), where) from None
    except OSError as error:
        _log.warning("%s: the folder cannot be locked (%s): it must not be used by two servers", where, error.strerror)


def check_lock(marker_fd: int, options: FilesystemOptions, path: str, where: str, *, replaces: int | None) -> None:
    """Refuses what `lock` would refuse, without a lock: to try one would refuse a server that starts at this moment.
    Processes of other machines and containers are not seen. Raises `ConfigFieldError`."""
    holders = _holders(marker_fd, options) - {replaces}
    if holders:
        raise _in_use(path, holders, where)


def _in_use(path: str, holders: set[int], where: str) -> ConfigFieldError:
    processes = f", process {', '.join(map(str, sorted(holders)))}" if holders else ""
    return ConfigFieldError(
        f"another server uses the folder {path}{processes}",
        where=f"{where}.path",
        hint="set shared = true for all of them, or name another folder",
    )


def _holders(marker_fd: int, options: FilesystemOptions) -> set[int]:
    """Processes whose lock excludes that of these options."""
    found = set()
    try:
        inode = _inode(marker_fd)
        with open("/proc/locks", encoding="ascii") as locks:
            for line in locks:  # 1: FLOCK  ADVISORY  WRITE 708 fe:00:2147018 0 EOF
                _, kind, _, mode, pid, place, *_ = line.split()
                if kind == "FLOCK" and place == inode and (mode == "WRITE" or not options.shared):
                    found.add(int(pid))
    except (OSError, ValueError, KeyError):  # /proc is hidden, or of another form: the start finds out
        return set()
    return found


def _inode(fd: int) -> str:
    """The name of a file in /proc/locks. Its device is not always the one of `stat`: of Btrfs and overlays."""
    with open(f"/proc/self/fdinfo/{fd}", encoding="ascii") as info:
        facts = dict(line.split(None, 1) for line in info if ":\t" in line)
    with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as mounts:
        devices = {mount: device for mount, _, device, *_ in map(str.split, mounts)}
    major, minor = map(int, devices[facts["mnt_id:"].strip()].split(":"))
    number = facts["ino:"].strip() if "ino:" in facts else os.fstat(fd).st_ino
    return f"{major:02x}:{minor:02x}:{number}"
