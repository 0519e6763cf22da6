"""Makes the alerts' rules for Prometheus and for its operator; the docs' address is that of pyproject.toml."""

from __future__ import annotations

from pathlib import Path

from kvf_observe.alerts import rules
from kvframework.api.toml import read_toml

PYPROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"
NOTE = "# Made from plugins/tools/observe/kvf_observe/alerts.py; renew with python -m tests.docs.generate\n"


HEAD = """\
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: kvframework
  labels: {app.kubernetes.io/name: kvframework}
spec:
"""


def prometheus() -> str:
    project = read_toml(PYPROJECT)["project"]
    assert isinstance(project, dict)
    return NOTE + rules(project["urls"]["Documentation"])


def kubernetes() -> str:
    note, rules = prometheus().split("\n", 1)
    return f"{note}\n{HEAD}" + "".join(
        f"  {line}" if line.strip() else line for line in rules.splitlines(keepends=True)
    )
