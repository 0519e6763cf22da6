"""The errors of `kvframework new`. After any of them nothing has been written."""

from __future__ import annotations

from kvframework.errors import KVFrameworkError


class ScaffoldError(KVFrameworkError, RuntimeError):
    """The folder of a new plugin cannot be written.

    What to do: choose a folder that you may write to with `--path`.
    """

    code = "scaffold.failed"


class NameRefused(ScaffoldError, ValueError):
    """The kind does not exist, or the name cannot be that of a plugin, or is taken here.

    What to do: choose a name of lower-case letters, digits and underscores that no other plugin has.
    """

    code = "scaffold.name"


class FolderExists(ScaffoldError, FileExistsError):
    """There is something at the place of the new folder already.

    What to do: choose another name or `--path`; nothing is ever written over.
    """

    code = "scaffold.exists"
