"""The site: every page in a menu, links with titles, a strict build, and nothing cut off on a phone."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "docs" / "site" / "pages.py"
NARROW = Path(__file__).with_name("narrow.html")
# Pages that are wrong, and one that is not, beside those of the site.
PLANTED = {"cut.html": "overflow: hidden", "scrolling.html": "overflow: auto", "wide.html": ""}
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


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
    done = subprocess.run(
        [str(builder), "build", "--strict", "--config-file", str(written / "zensical.toml")],
        cwd=written,
        env=os.environ | {"NO_COLOR": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return written / "site"


def test_a_link_that_is_called_like_a_file_gets_the_title() -> None:
    text = pages.page_text("docs/operations.md", "https://example.org/x")
    assert "[security.md](" not in text
    assert "[Security](security.md)" in text


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


def test_version_and_repository_are_the_packages(written: Path) -> None:
    text = (written / "zensical.toml").read_text()
    assert not re.search("VERSION|REPOSITORY", text)
    assert re.search(r'^repo_url = "https://\S+"$', text, re.MULTILINE)


def test_every_page_is_built_strictly(site: Path) -> None:
    assert len(list(site.rglob("*.html"))) > len(pages.pages())


@pytest.fixture
def address(site: Path) -> Iterator[str]:
    """Where the site is served, so that a page may look into its frames."""
    names = sorted(str(file.relative_to(site)) for file in site.rglob("*.html"))
    for name, style in PLANTED.items():
        text = f'<body style="margin: 0"><div class="md-content" style="width: 360px; {style}"><p>x</p></div></body>'
        (site / name).write_text(text.replace("<p>", '<p style="width: 400px; margin: 0">'))
    (site / "narrow.html").write_text(NARROW.read_text().replace("@PAGES@", " ".join([*names, *PLANTED])))
    handler = functools.partial(Quiet, directory=str(site))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@pytest.mark.skipif(BROWSER is None, reason="no chromium here")
def test_nothing_is_cut_off_on_a_phone(address: str) -> None:
    options = ("--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=120000", "--dump-dom")
    done = subprocess.run(
        [str(BROWSER), *options, f"{address}/narrow.html"],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    said = re.sub(r"<br>", "\n", done.stdout)
    assert re.search(r"looked at (\d+)", said), done.stdout[-2000:] + done.stderr[-2000:]
    found = re.findall(r"^(?:.*<body>)?(\S+\.html): (\S.*)$", said, re.MULTILINE)
    assert found == [("cut.html", "P x"), ("wide.html", "scrolls to 400; P x")]


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Nothing."""
