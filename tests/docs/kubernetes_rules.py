"""Makes deploy/kubernetes/monitoring/prometheusrule.yaml: the alerts in the form of the Prometheus Operator."""

from __future__ import annotations

from tests.docs import alert_rules

HEAD = """\
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: kvframework
  labels: {app.kubernetes.io/name: kvframework}
spec:
"""


def file() -> str:
    note, rules = alert_rules.file().split("\n", 1)
    return f"{note}\n{HEAD}" + "".join(
        f"  {line}" if line.strip() else line for line in rules.splitlines(keepends=True)
    )
