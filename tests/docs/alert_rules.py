"""Makes deploy/prometheus/kvframework.rules.yml out of the alerts; the docs' address is that of pyproject.toml."""

from __future__ import annotations

from pathlib import Path

from kvf_observe.alerts import rules
from kvframework.api.toml import read_toml

PYPROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"
NOTE = "# Made from plugins/tools/observe/kvf_observe/alerts.py; renew with python -m tests.docs.generate\n"


def file() -> str:
    project = read_toml(PYPROJECT)["project"]
    assert isinstance(project, dict)
    return NOTE + rules(project["urls"]["Documentation"])
