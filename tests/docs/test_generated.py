"""What is made from the sources is as they are; nothing that an author meets is without docs or without a test. The
reference has every public module, and every public class, function and method has a docstring. What
docs/plugins/compatibility.md promises the author of a plugin holds."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from runpy import run_path

import pytest

from kvframework.api import plugin
from kvframework.api.tier import Tier, TierProvider
from kvframework.config.load import load_config
from kvframework.errors import ConfigFieldError, PluginWrongApi
from kvframework.registry import plugin_check
from kvframework.registry.discovery import KINDS
from kvframework.registry.registry import PluginRegistry
from kvframework.registry.tables import complete_config
from tests.core.api import surface
from tests.core.registry.fake_distributions import info, install
from tests.docs import api_reference, error_codes, option_tables
from tests.docs.api_reference import REFERENCE
from tests.docs.generate import RENEW, generated
from tests.docs.shown import blocks

ROOT = Path(__file__).resolve().parents[2]
MADE = ("test_generated.py", "api_reference.py", "error_codes.py")
FOLDERS = (ROOT / "tests", ROOT / "benchmarks" / "tests")


@pytest.fixture(scope="module")
def tests() -> str:
    """The source of all tests."""
    files = (file for folder in FOLDERS for file in sorted(folder.rglob("*.py")) if file.name not in MADE)
    return "\n".join(file.read_text() for file in files)


def test_every_generated_file_is_as_the_sources_are() -> None:
    old = [
        str(file.relative_to(ROOT))
        for file, text in generated().items()
        if not file.exists() or file.read_text() != text
    ]
    assert old == [], f"run {RENEW}"


# options


@pytest.mark.parametrize("readme", option_tables.readmes(), ids=lambda readme: readme.parent.name)
def test_every_plugin_has_a_table_of_its_options(readme: Path) -> None:
    """On a page of the reference, to which its README leads."""
    page = (ROOT / "docs" / "reference" / "options.md").read_text()
    assert set(option_tables.readmes()[readme]) <= set(re.findall(r"^## (.+)$", page, re.MULTILINE))
    assert "docs/reference/options.md#" in readme.read_text() or "No options." in readme.read_text()


def test_every_option_is_described() -> None:
    assert "|  |" not in option_tables.page()


# hooks


@pytest.mark.parametrize("kind", KINDS)
def test_every_hook_has_a_page_with_an_example_that_a_test_runs(kind: str, tests: str) -> None:
    page = api_reference.GUIDES[kind]
    assert f"@hookimpl\ndef {KINDS[kind].hook}(" in (ROOT / "docs" / "plugins" / page).read_text()
    assert f'"{page}"' in tests, "no test runs its example"


# errors


def test_every_error_has_docs_and_a_test_and_is_raised(tests: str) -> None:
    for code in error_codes.codes():
        assert code.meaning.endswith("."), code.name
        assert code.advice or code.code == "error", f"{code.name} says no 'What to do: ...' in its docstring"
        assert code.raised or code.is_base, f"nothing raises {code.name}: delete it"
        named = rf'\b{code.name}\b|"{re.escape(code.code)}"|\[{re.escape(code.code)}\\?\]'
        assert re.search(named, tests), f"{code.name} has no test"


def test_the_example_of_an_error_is_real(tmp_path: Path) -> None:
    (tmp_path / "kvf.toml").write_text("[l1]\ncapacty = 1\n")
    with pytest.raises(ConfigFieldError) as caught:
        complete_config(load_config(tmp_path / "kvf.toml"), PluginRegistry())
    assert str(caught.value).replace(f"{tmp_path}/", "") in error_codes.HEAD


MODULES = tuple(module for _, modules in REFERENCE.values() for module in modules)
Defined = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def test_every_public_module_is_on_one_page() -> None:
    assert sorted(MODULES) == sorted({*surface.MODULES, *surface.SIMULATOR, "kvframework.wire.messages"})


def undocumented(module: str) -> Iterator[str]:
    """Yield the public names of a module without a docstring. An overriding method has that of what it overrides."""
    if ast.get_docstring(ast.parse(surface.source(module))) is None:
        yield module
    for name, definition in surface.public(module).items():
        if isinstance(definition.node, Defined):
            if ast.get_docstring(definition.node) is None:
                yield name
            if isinstance(definition.node, ast.ClassDef) and not _overrides(definition.node):
                yield from (f"{name}.{method}" for method in _bare(definition.node))


def _overrides(node: ast.ClassDef) -> bool:
    """Whether methods may override others, whose docstrings they have."""
    return any(ast.unparse(base).partition("[")[0] not in ("ABC", "Generic", "Protocol") for base in node.bases)


def _bare(node: ast.ClassDef) -> Iterator[str]:
    for each in node.body:
        is_public = isinstance(each, Defined) and not each.name.startswith(("_", "test_"))
        if isinstance(each, Defined) and is_public and ast.get_docstring(each) is None:
            if ast.unparse(each.body) == "...":  # of a protocol, whose docstring describes them all
                continue
            decorators = {ast.unparse(decorator) for decorator in each.decorator_list}
            if not any(name.endswith((".setter", "overload", "fixture")) for name in decorators):
                yield each.name


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_has_a_docstring(module: str) -> None:
    assert list(undocumented(module)) == []


PAGE = (Path(__file__).resolve().parents[2] / "docs" / "plugins" / "compatibility.md").read_text()
MODULE = """
    from kvframework.api.tier import TierProvider, hookimpl
    @hookimpl
    def kvf_tiers():
        return [TierProvider(name="mystore", summary="", create=print{needs})]
"""


def my_store(site: Path, needs: str = "") -> None:
    install(
        site, "kvf-mystore", {"tier.mystore": "kvf_mystore"}, {"kvf_mystore": MODULE.format(needs=needs)}, version="2.0"
    )


def test_a_plugin_of_1_0_under_a_server_of_1_1_loads(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin_check, "API_VERSION", (1, 1))
    my_store(site)
    assert isinstance(PluginRegistry().resolve("tier", "mystore"), TierProvider)


def test_a_plugin_of_1_1_under_a_server_of_1_0_is_refused_as_it_says(site: Path, tmp_path: Path) -> None:
    my_store(site, ', requires_api="1.1"')
    (tmp_path / "kvf.toml").write_text('[[l2]]\nuse = "mystore"\n')
    registry = PluginRegistry()
    with pytest.raises(PluginWrongApi) as caught:
        complete_config(load_config(tmp_path / "kvf.toml"), registry)
    assert str(caught.value).replace(f"{tmp_path / 'kvf.toml'}: ", "") == blocks(PAGE, "text")[0].strip()
    assert info(registry, "tier", "mystore").status == "wrong-api"


def test_what_1_1_adds_has_a_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plugin that asks for it finds out which API it runs on."""
    shown = tmp_path / "shown.py"
    shown.write_text(blocks(PAGE, "python")[0])
    for version, expected in (((1, 0), False), ((1, 1), True), ((1, 10), True)):
        monkeypatch.setattr(plugin, "API_VERSION", version)
        assert run_path(str(shown))["HAS_IT"] is expected


def test_a_distribution_may_serve_two_majors(site: Path) -> None:
    for group, named, value in re.findall(r'entry-points."(kvframework\.v\d)"\]\n"([\w.]+)" = "([\w.]+)"', PAGE):
        install(site, "kvf-mystore", {named: value.replace(".", "_")}, group=group)
    source = MODULE.format(needs="")
    install(site, "kvf-mystore", {}, {"kvf_mystore_v1": source}, group="others")
    assert PluginRegistry().resolve("tier", "mystore").name == "mystore"


def test_contracts_demand_no_more_than_they_did() -> None:
    """The methods without a default are those of API 1.0."""
    assert Tier.__abstractmethods__ == {"contains", "get_into", "put", "delete", "close"}
