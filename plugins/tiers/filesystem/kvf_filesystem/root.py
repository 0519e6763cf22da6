"""Opening of the tier's folder: created, recognised by its marker file, locked on that, and tested for O_DIRECT.

Blocking; called when the tier is created, and again from a storage thread if the folder was lost.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import mmap
import os
import stat
import threading
import time
from dataclasses import dataclass

from kvf_filesystem import FilesystemOptions
from kvf_filesystem.form import FOLDERS, FORMAT, PAGE, REFUSALS, folder_name
from kvframework.api.plugin import ByteSize, Finding
from kvframework.errors import ConfigFieldError

FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Two changes within one tick of the file system's clock leave the same time.
_TICK_NS = 100_000_000


class Folders:
    """Thread-safe. Borrows the root's descriptor; owns those of the folders, at most 256, until `close`.

    The descriptor of a folder keeps its number: where the folder was made again, that names the new one from then on.
    A call of another thread never finds it closed, or naming something else.
    """

    def __init__(self, root_fd: int) -> None:
        self._root_fd = root_fd
        self._fds = [-1] * FOLDERS
        self._inodes = [(0, 0)] * FOLDERS
        self._lock = threading.Lock()  # never held over a system call
        self._opening = threading.Lock()
        # The number of the last change of the root, and that at which each folder was found in its place.
        self._change = 1
        self._found_at = [0] * FOLDERS
        self._changed_ns = 0

    def seen(self, root: os.stat_result) -> None:
        """Take note of the status of the root, as of now."""
        if root.st_ctime_ns != self._changed_ns or time.time_ns() - root.st_ctime_ns < _TICK_NS:
            with self._lock:
                self._changed_ns = root.st_ctime_ns
                self._change += 1

    def at(self, folder: int) -> int:
        """The descriptor of the folder, as of the last `seen`. Raises `OSError`: `FileNotFoundError` if there is none,
        `NotADirectoryError` for a link or a file in its place."""
        return self._fds[folder] if self._found_at[folder] == self._change else self.now(folder)

    def now(self, folder: int) -> int:
        """Like `at`, as of now: before a change, which must not be made in a folder that was moved away."""
        name, change = folder_name(folder), self._change
        if self._fds[folder] < 0 or self._inodes[folder] != _identity(
            os.stat(name, dir_fd=self._root_fd, follow_symlinks=False)
        ):
            self._open(folder, name)
        self._found_at[folder] = change
        return self._fds[folder]

    def close(self) -> None:
        for fd in self._fds:
            if fd >= 0:
                os.close(fd)

    def _open(self, folder: int, name: str) -> None:
        # One at a time, so that no slow thread puts back a folder that was replaced meanwhile.
        with self._opening:
            fd = os.open(name, FOLDER_FLAGS, dir_fd=self._root_fd)
            inode = _identity(os.fstat(fd))
            if self._fds[folder] < 0:
                self._fds[folder] = fd
            else:
                os.dup2(fd, self._fds[folder], inheritable=False)
                os.close(fd)
            self._inodes[folder] = inode


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


_log = logging.getLogger(__name__)


def lock(marker_fd: int, options: FilesystemOptions, path: str, where: str) -> None:
    """Locks the folder against a second server that is configured to use it alone. Nothing else relies on this.
    Raises `ConfigFieldError`."""
    try:
        fcntl.flock(marker_fd, (fcntl.LOCK_SH if options.shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        raise _in_use(path, _holders(marker_fd, options), where) from None
    except OSError as error:
        _log.warning("%s: the folder cannot be locked (%s): only one server may use the folder", where, error.strerror)


def check_lock(marker_fd: int, options: FilesystemOptions, path: str, where: str, *, replaces: int | None) -> None:
    """Refuse what `lock` would refuse, without a lock: to try one would refuse a server that starts at this moment.
    Processes of other machines and containers are not seen. Raises `ConfigFieldError`."""
    holders = _holders(marker_fd, options) - {replaces}
    if holders:
        raise _in_use(path, holders, where)


def _in_use(path: str, holders: set[int], where: str) -> ConfigFieldError:
    processes = f", process {', '.join(map(str, sorted(holders)))}" if holders else ""
    return ConfigFieldError(
        f"another server uses the folder {path}{processes}",
        where=f"{where}.path",
        hint="set shared = true in every server, or use another folder",
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


MARKER = "kvframework-filesystem-tier"
_MARK = f"kvframework filesystem tier, format {FORMAT}\n".encode()
_PASSED_OVER = {MARKER, "lost+found"}  # a new ext4 file system is not empty


@dataclass
class Root:
    """The open folder; all of the tier's paths are relative to `fd`. Owns both descriptors until `close`."""

    path: str
    fd: int
    marker_fd: int
    folders: Folders
    direct_writes: bool = False
    direct_reads: bool = False

    def gone(self) -> bool:
        """True once the folder was removed, even if its path exists again. Each call asks it first. Raises
        `OSError`."""
        found = os.fstat(self.fd)
        self.folders.seen(found)
        return found.st_nlink == 0

    def usable(self) -> bool:
        """True if the permissions of the folder allow reading and writing files in it."""
        return _usable(self.fd)

    def spared_by(self, error: OSError, folder: int) -> bool:
        """True if `error` is a refusal that concerns one file and not all of the fan-out folder."""
        if error.errno not in (errno.EACCES, errno.EPERM):
            return False
        try:
            return _usable(self.folders.now(folder))
        except OSError:
            return False

    def close(self) -> None:
        self.folders.close()
        os.close(self.fd)
        os.close(self.marker_fd)


def open_root(options: FilesystemOptions, *, where: str) -> Root:
    """Open the folder; create it if it is missing. Links in its path are followed here, and never again. Raises
    `ConfigFieldError`."""
    path = _absolute(options.path, where)
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
        path = os.path.realpath(path, strict=True)
    except OSError as error:
        raise _refused(path, error, where) from error
    return open_again_at(path, options, where=where)


def open_again_at(path: str, options: FilesystemOptions, *, where: str) -> Root:
    """Open the folder at the `path` of an earlier root, if it is there and no part of it is a link. Raises
    `ConfigFieldError`."""
    try:
        fd = _open_part_by_part(path)
    except OSError as error:
        raise _refused(path, error, where) from error
    try:
        root = Root(path, fd, _open_marker(fd, path, where), Folders(fd))
    except OSError as error:
        os.close(fd)
        raise _refused(path, error, where) from error
    except BaseException:
        os.close(fd)
        raise
    try:
        _check(root, options, path, where)
    except BaseException:
        root.close()
        raise
    return root


def check_root(options: FilesystemOptions, *, where: str, replaces: int | None = None) -> None:
    """Refuse a folder that `open_root` would refuse, without creating, locking or writing anything. What process
    `replaces` has locked is not refused. Raises `ConfigFieldError`."""
    path = _absolute(options.path, where)
    base = path
    while not os.path.lexists(base):
        base = os.path.dirname(base)
    try:
        fd = os.open(base, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise _refused(path, error, where) from error
    try:
        if not _usable(fd):
            raise _not_writable(base, where)
        if base == path:
            _check_private(fd, path, where)
            _check_marker(fd, path, where)
            with contextlib.suppress(FileNotFoundError):
                marker_fd = os.open(MARKER, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
                try:
                    check_lock(marker_fd, options, path, where, replaces=replaces)
                finally:
                    os.close(marker_fd)
    except OSError as error:
        raise _refused(path, error, where) from error
    finally:
        os.close(fd)


def _absolute(path: str, where: str) -> str:
    path = os.path.expanduser(path)
    if "\0" in path or path.startswith("~"):
        raise ConfigFieldError(
            f"the path {path!r} does not name a folder", where=f"{where}.path", hint="write / or a user's name after ~"
        )
    return os.path.abspath(path)


def _open_part_by_part(path: str) -> int:
    above = os.open("/", os.O_PATH | FOLDER_FLAGS)
    *parents, name = path.strip("/").split("/")
    try:
        for part in parents:
            fd = os.open(part, os.O_PATH | FOLDER_FLAGS, dir_fd=above)
            os.close(above)
            above = fd
        return os.open(name or ".", FOLDER_FLAGS, dir_fd=above)
    finally:
        os.close(above)


def _usable(fd: int) -> bool:
    return os.access(".", os.R_OK | os.W_OK | os.X_OK, dir_fd=fd, effective_ids=True)


def _not_writable(path: str, where: str) -> ConfigFieldError:
    return ConfigFieldError(f"the folder {path} is not writable", where=f"{where}.path", hint="check owner and mode")


def _check(root: Root, options: FilesystemOptions, path: str, where: str) -> None:
    if not root.usable():
        raise _not_writable(path, where)
    _check_private(root.fd, path, where)
    lock(root.marker_fd, options, path, where)
    if options.direct != "off":
        able = _can_bypass_cache(root.fd)
        if options.direct == "on" and not able:
            raise ConfigFieldError(
                f"the file system of {path} cannot bypass the page cache",
                where=f"{where}.direct",
                available='"auto", "off"',
            )
        # Measured (README.md): writing gains by it, while reading ahead gains more for reads. Not measured through NFS.
        root.direct_writes = able and (options.direct == "on" or not options.shared)
        root.direct_reads = options.direct == "on"


def _check_private(fd: int, path: str, where: str) -> None:
    """Refuse a folder that others may write to: their files would be loaded as KV, and a checksum detects damage, not
    intent."""
    status = os.fstat(fd)
    if status.st_mode & stat.S_IWOTH:
        raise ConfigFieldError(
            f"any user may write to the folder {path}: {stat.filemode(status.st_mode)}",
            where=f"{where}.path",
            hint="use a folder inside this folder, or remove the permission: chmod o-w",
        )
    if status.st_uid not in (0, os.geteuid()):
        _log.warning("%s: uid %d owns the folder %s, and may change the stored values", where, status.st_uid, path)


def _check_marker(fd: int, path: str, where: str) -> None:
    """Refuse a folder with other files, or with a marker of another format. Raises `ConfigFieldError`, `OSError`."""
    names = os.listdir(fd)
    if MARKER not in names:
        if not _PASSED_OVER.issuperset(names):
            raise ConfigFieldError(
                f"the folder {path} contains files that this tier did not write",
                where=f"{where}.path",
                hint="use an empty folder, or one that does not exist yet",
            )
        return
    # O_NONBLOCK: opening a FIFO in place of the marker would block.
    marker_fd = os.open(MARKER, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=fd)
    try:
        status = os.fstat(marker_fd)
        is_file = stat.S_ISREG(status.st_mode)
        found = os.pread(marker_fd, len(_MARK) + 1, 0) if is_file else b""
    finally:
        os.close(marker_fd)
    if not is_file or (found != _MARK and status.st_nlink > 1):  # a torn one is written, but not a file of others
        raise ConfigFieldError(
            f"{MARKER} in the folder {path} is not a file of this tier", where=f"{where}.path", hint="remove that file"
        )
    if not _MARK.startswith(found):
        raise ConfigFieldError(
            f"the folder {path} has another format: {found.decode(errors='replace').strip()!r}",
            where=f"{where}.path",
            available=_MARK.decode().strip(),
            hint="use another folder",
        )


def _open_marker(fd: int, path: str, where: str) -> int:
    _check_marker(fd, path, where)
    marker_fd = os.open(MARKER, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=fd)
    try:
        # Shorter while another server writes it, or where one was killed while it did.
        if os.pread(marker_fd, len(_MARK), 0) != _MARK:
            os.pwrite(marker_fd, _MARK, 0)
    except OSError:
        os.close(marker_fd)
        raise
    return marker_fd


def _can_bypass_cache(fd: int) -> bool:
    page = mmap.mmap(-1, PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        file = os.open(".", os.O_TMPFILE | os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC, 0o600, dir_fd=fd)
    except OSError:
        return False
    try:
        os.pwrite(file, page, 0)
    except OSError as error:
        return error.errno not in REFUSALS  # a full disk proves nothing
    finally:
        os.close(file)
    return True


def _refused(path: str, error: OSError, where: str) -> ConfigFieldError:
    hints = {errno.ENOTDIR: "set path to a folder", errno.ENOSPC: "free space on the disk"}
    fact = f"the folder {path} cannot be used: {os.strerror(error.errno or errno.EIO)}"
    return ConfigFieldError(fact, where=f"{where}.path", hint=hints.get(error.errno or 0, "check owner and mode"))


_LEAST_FREE = 0.05


def diagnose(options: FilesystemOptions) -> list[Finding]:
    """The checks of `kvframework doctor`, by a few calls of the file system, which block as long as that does.

    Only reads: it creates, locks and writes nothing, since a server may be using the folder.
    """
    path = os.path.abspath(os.path.expanduser(options.path))
    there = os.path.exists(path)
    base = path
    while not os.path.exists(base):
        base = os.path.dirname(base)
    return [_folder(path, base), _space(base, options, stored=there and os.path.exists(os.path.join(path, MARKER)))]


def _folder(path: str, base: str) -> Finding:
    """The finding for a usable folder; `check_root` refuses any other."""
    made = "is writable" if base == path else f"does not exist yet and will be made in {base}"
    return Finding("filesystem.folder", "ok", f"{path} {made}")


def _space(base: str, options: FilesystemOptions, *, stored: bool) -> Finding:
    """Check the free space. In a folder with values part of the capacity is taken already, so only the free space
    counts."""
    system = os.statvfs(base)
    free, size = ByteSize(system.f_bavail * system.f_frsize), ByteSize(system.f_blocks * system.f_frsize)
    fact = f"the disk has {free} free of {size}, and the tier's capacity is {options.capacity}"
    advice = "lower capacity, or use a larger disk: on a full disk every write fails"
    if size < options.capacity:
        return Finding("filesystem.space", "fail", fact, advice)
    if free < (_LEAST_FREE * options.capacity if stored else options.capacity):
        return Finding("filesystem.space", "warn", fact, advice)
    return Finding("filesystem.space", "ok", fact)
