"""The contents of a fan-out folder: its values, their bytes for the ledger, and temporary files whose writers died.
Runs in the counting thread and in storage threads."""

from __future__ import annotations

import contextlib
import os
import stat
import time

from kvf_filesystem.folders import FOLDER_FLAGS
from kvf_filesystem.form import counted_bytes, folder_name, key_of, token_of
from kvf_filesystem.ledger import Ledger, Limit
from kvf_filesystem.root import Root
from kvframework.api.tier import TierEntry

# In a shared folder, a temporary file without a write for this long has no writer.
_DEAD_AFTER_S = 3600.0


class Lister:
    """Lists folders and books their bytes. Thread-safe. Names that are not this tier's are passed over."""

    def __init__(self, ledger: Ledger, *, shared: bool, token: str) -> None:
        self._ledger = ledger
        self._shared = shared
        self._token = token

    def entries(self, root: Root, limit: Limit, *, folder: int) -> list[TierEntry]:
        """Every value in `folder`. Raises `OSError` and the errors of `limit`."""
        # A lock does not keep other servers out of a shared folder, so there it would only cost.
        with contextlib.nullcontext() if self._shared else limit.holding(self._ledger.locks[folder]):
            entries = self._listed(root, folder, limit)
            self._ledger.recount(folder, sum(entry.nbytes for entry in entries))
        return entries

    def _listed(self, root: Root, folder: int, limit: Limit) -> list[TierEntry]:
        entries = []
        try:
            # One of its own: those that share a descriptor share the place in its list, too.
            fd = os.open(folder_name(folder), FOLDER_FLAGS, dir_fd=root.fd)
        except (FileNotFoundError, NotADirectoryError):  # the latter for a link, too
            return []
        try:
            with os.scandir(fd) as found:
                for number, each in enumerate(found):
                    if number % 256 == 0:
                        limit.check()
                    key, token = key_of(folder, each.name), token_of(each.name)
                    if key is None and token in (None, self._token):
                        continue
                    with contextlib.suppress(FileNotFoundError):
                        status = each.stat(follow_symlinks=False)
                        if key is not None and stat.S_ISREG(status.st_mode):
                            entries.append(TierEntry(key, counted_bytes(status.st_size), status.st_mtime))
                        elif token is not None and self._is_dead(status):
                            os.unlink(each.name, dir_fd=fd)
        finally:
            os.close(fd)
        return entries

    def _is_dead(self, status: os.stat_result) -> bool:
        return not self._shared or time.time() - status.st_mtime > _DEAD_AFTER_S
