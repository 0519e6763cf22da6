"""`python -m tests.docs.generate` writes the pages and tables that are made from the sources; a test compares them."""

from __future__ import annotations

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

from kvframework import __version__
from kvframework.api.toml import read_toml
from tests.docs import (
    api_reference,
    configuration_tables,
    counter_table,
    engine_table,
    option_tables,
    reference_tables,
    registry_table,
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
    reference = DOCS / "reference"
    files[reference / "commands.md"] = NOTE + reference_tables.commands()
    files[reference / "configuration.md"] = NOTE + configuration_tables.page()
    files[reference / "metrics.md"] = NOTE + reference_tables.metrics()
    files[reference / "options.md"] = NOTE + option_tables.page()
    files[reference / "plugins.md"] = NOTE + registry_table.page()
    deploy, alerts = ROOT / "deploy", _generator("prometheus/alerts.py")
    documentation = read_toml(ROOT / "pyproject.toml")["project"]["urls"]["Documentation"]
    chart = deploy / "helm" / "kvframework" / "Chart.yaml"
    release = f"version: {__version__.replace('.dev', '-dev')}\nappVersion: {__version__}\n"
    files[chart] = chart.read_text().partition("version: ")[0] + release
    dashboards = _generator("grafana/dashboard.py")
    files[deploy / "grafana" / "kvframework.json"] = dashboards.dashboard()
    files[deploy / "grafana" / "kvframework-fleet.json"] = dashboards.fleet()
    files[deploy / "prometheus" / "kvframework.rules.yml"] = alerts.prometheus(documentation)
    files[DOCS / "engines" / "README.md"] = NOTE + engine_table.page()
    files |= {reference / name: NOTE + text for name, text in api_reference.pages().items()}
    files[reference / "status.md"] += f"\n## Counters\n{counter_table.table()}"
    return {file: in_step(text) for file, text in files.items()}


def _generator(script: str) -> ModuleType:
    """The generator of files of `deploy/`, which is beside them and in no package."""
    spec = spec_from_file_location(script.rpartition("/")[2].removesuffix(".py"), ROOT / "deploy" / script)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    for file, text in generated().items():
        if not file.exists() or file.read_text() != text:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
            print(file)
