"""`python -m tests.docs.generate` writes the pages and tables that are made from the sources; a test compares them."""

from __future__ import annotations

from pathlib import Path

from tests.docs import error_reference, hook_reference, option_tables

ROOT = Path(__file__).resolve().parents[2]
RENEW = "python -m tests.docs.generate"
NOTE = f"<!-- Made from the sources; renew with {RENEW} -->\n"


def generated() -> dict[Path, str]:
    """Every file that holds something made, as it is to be."""
    files = {
        ROOT / "docs" / "errors.md": NOTE + error_reference.page(),
        ROOT / "docs" / "plugins" / "hooks.md": NOTE + hook_reference.page(),
    }
    return files | {readme: option_tables.renewed(readme, offers) for readme, offers in option_tables.readmes().items()}


if __name__ == "__main__":
    for file, text in generated().items():
        if not file.exists() or file.read_text() != text:
            file.write_text(text)
            print(file)
