"""An import that fails with the install command where the kits cannot run; it comes before any import of pytest."""

from __future__ import annotations

from importlib.util import find_spec

for _name in ("pytest", "hypothesis"):
    if find_spec(_name) is None:
        raise ModuleNotFoundError(f'the kits need {_name}: pip install "kvframework[testing]"', name=_name)
