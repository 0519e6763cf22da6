"""Says what to install where the kits cannot run. Imported before anything that imports pytest."""

from __future__ import annotations

from importlib.util import find_spec

for _name in ("pytest", "hypothesis"):
    if find_spec(_name) is None:
        raise ModuleNotFoundError(f'the kits need {_name}: pip install "kvframework[testing]"', name=_name)
