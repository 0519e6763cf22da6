"""What is made from the sources is as they are; nothing that an author meets is without docs or without a test."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvframework.config.load import load_config
from kvframework.errors import ConfigFieldError
from kvframework.registry.discovery import KINDS
from kvframework.registry.registry import PluginRegistry
from kvframework.registry.tables import complete_config
from tests.docs import api_reference, error_codes, option_tables
from tests.docs.generate import RENEW, generated

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
