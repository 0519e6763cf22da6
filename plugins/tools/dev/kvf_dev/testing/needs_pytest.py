"""An import that fails with the install command where the kits cannot run; it comes before any import of pytest."""

from __future__ import annotations

from importlib.util import find_spec

from kvframework.api.installing import install_command

for _name in ("pytest", "hypothesis"):
    if find_spec(_name) is None:
        raise ModuleNotFoundError(
            f"the kits need {_name}: {install_command(distribution='kvframework-dev')}", name=_name
        )
