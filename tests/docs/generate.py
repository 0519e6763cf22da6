"""`python -m tests.docs.generate` writes the pages and tables that are made from the sources; a test compares them."""

from __future__ import annotations

from pathlib import Path

from kvf_observe.dashboard import dashboard
from tests.docs import (
    alert_rules,
    configuration_tables,
    counter_table,
    engine_table,
    error_reference,
    hook_reference,
    option_tables,
    reference_tables,
    registry_table,
    ttft_plot,
)
from tests.docs.install_commands import in_step
from tests.docs.prose import PAGES

ROOT = Path(__file__).resolve().parents[2]
RENEW = "python -m tests.docs.generate"
NOTE = f"<!-- Made from the sources; renew with {RENEW} -->\n"
DOCS = ROOT / "docs"


def generated() -> dict[Path, str]:
    """Every file that holds something made, as the sources have it."""
    files = {page: page.read_text() for page in PAGES if page.name != "CHANGELOG.md"}
    files[DOCS / "errors.md"] = NOTE + error_reference.page()
    files[DOCS / "plugins" / "hooks.md"] = NOTE + hook_reference.page()
    files[DOCS / "commands.md"] = reference_tables.commands(files[DOCS / "commands.md"])
    files[DOCS / "configuration.md"] = configuration_tables.renewed(files[DOCS / "configuration.md"])
    files[DOCS / "status.md"] = counter_table.renewed(files[DOCS / "status.md"])
    files[ROOT / "deploy" / "grafana" / "kvframework.json"] = dashboard()
    files[ROOT / "deploy" / "prometheus" / "kvframework.rules.yml"] = alert_rules.prometheus()
    files[ROOT / "deploy" / "kubernetes" / "monitoring" / "prometheusrule.yaml"] = alert_rules.kubernetes()
    files[DOCS / "metrics.md"] = NOTE + reference_tables.metrics()
    engines = DOCS / "engines" / "README.md"
    files[engines] = engine_table.renewed(files[engines])
    registry = DOCS / "plugins" / "registry.md"
    files[registry] = registry_table.renewed(files[registry])
    files |= {readme: option_tables.renewed(readme, offers) for readme, offers in option_tables.readmes().items()}
    files[DOCS / "ttft.svg"] = ttft_plot.drawn(files[DOCS / "benchmarks.md"])
    return {file: in_step(text) for file, text in files.items()}


if __name__ == "__main__":
    for file, text in generated().items():
        if not file.exists() or file.read_text() != text:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
            print(file)
