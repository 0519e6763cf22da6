"""The site: every page in a menu, links with titles, and a strict build."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.processes import ran

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "docs" / "site" / "pages.py"


def load_pages() -> ModuleType:
    spec = importlib.util.spec_from_file_location("site_pages", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


pages = load_pages()


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    subprocess.run([sys.executable, str(SCRIPT), str(folder)], check=True, timeout=60)
    return folder


@pytest.fixture(scope="module")
def site(written: Path) -> Path:
    """The built site."""
    builder = Path(sys.executable).with_name("zensical")
    if not builder.exists():
        pytest.skip("no zensical here: `pip install --group site`")
    ran(
        *(str(builder), "build", "--strict", "--config-file", str(written / "zensical.toml")),
        cwd=written,
        env=os.environ | {"NO_COLOR": "1"},
        timeout=120,
    )
    return written / "site"


def test_what_is_no_page_leads_to_the_repository() -> None:
    text = pages.page_text("README.md", "https://example.org/x")
    assert "[Apache-2.0](https://example.org/x/blob/main/LICENSE)" in text
    assert "](architecture.svg)" in text


def test_a_link_to_nothing_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    monkeypatch.setattr(pages, "pages", lambda: {"a.md": "a.md"})
    (tmp_path / "a.md").write_text("# A\n[b](b.md)\n")
    with pytest.raises(pages.SiteError, match=r"a\.md: \[b\]\(b\.md\) leads to no file"):
        pages.page_text("a.md", "")


@pytest.mark.parametrize(
    ("page", "wrong"),
    [
        ("| a | b |\n|---|---|\n| 1 | 2 |\n\n| 3 | 4 |\n", r"the row \| 3 \| 4 \| is outside of a table"),
        ("| a | b |\n|---|---|\n| 1 | 2 |\n\n| 3 | 4 |\n| 5 | 6 |", r"the row \| 3 \| 4 \| is outside of a table"),
        ("Words:\n| a | b |\n|---|---|\n| 1 | 2 |\n", r"the table \| a \| b \| needs a blank line"),
        ("| a | b |\n|---|---|\n| 1 |\n", r"the row \| 1 \| has another number of cells"),
    ],
)
def test_a_row_outside_of_its_table_is_refused(
    page: str, wrong: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    monkeypatch.setattr(pages, "pages", lambda: {"a.md": "a.md"})
    (tmp_path / "a.md").write_text(f"# A\n{page}")
    with pytest.raises(pages.SiteError, match=rf"^a\.md: {wrong}"):
        pages.page_text("a.md", "")


def test_tables_and_what_only_looks_like_one_are_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = "# A\n| a | b |\n|---|:-:|\n| 1 | 2 \\| 3 |\n\n```text\n| rows | of output |\n```\n"
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    monkeypatch.setattr(pages, "pages", lambda: {"a.md": "a.md"})
    (tmp_path / "a.md").write_text(text)
    assert pages.page_text("a.md", "") == text


def test_every_page_is_built_strictly(site: Path) -> None:
    assert len(list(site.rglob("*.html"))) > len(pages.pages())
