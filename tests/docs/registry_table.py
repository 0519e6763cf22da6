"""Makes docs/reference/plugins.md out of the entry points of this repository, ours and the examples'.

The last column names the kit that a plugin passes, and the test file that has it pass: found in the tests, where a
class of that kit names the plugin, or is in a file that imports its module, or in the example's own tests.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from kvframework.registry.discovery import EntryPointInfo
from kvframework.registry.registry import PluginRegistry
from tests.docs.option_tables import ROOT, importable, is_ours, readmes

KITS = {
    "transport": "TransportConformance",
    "layout": "LayoutConformance",
    "memory": "MemoryConformance",
    "tier": "TierConformance",
    "eviction": "EvictionConformance",
    "hasher": "HasherConformance",
    "codec": "CodecConformance",
    "listener": "ListenerConformance",
}


def page() -> str:
    """The reference of plugins, ours and the examples'."""
    return (
        "# List of plugins\n\n"
        'A server\'s TOML names a plugin by `use = "redis"`. The column "passes" names the kit and its test.\n\n'
        f"## Plugins of this repository\n{_table(ours=True)}\n"
        "## Examples\n"
        "Complete distributions, laid out like a third party's. `pip install FOLDER` installs one.\n\n"
        f"{_table(ours=False)}"
    )


def proof(offer: EntryPointInfo, folders: tuple[Path, ...]) -> Path | None:
    """The test file in which a plugin passes the kit of its kind; None if there is none."""
    module = offer.value.partition(".")[0]
    classes = re.compile(rf"class \w+\({KITS[offer.kind]}\):\n.*?(?=\n(?:class|def|@)|\Z)", re.DOTALL)
    files = [file for folder in folders for file in sorted(folder.rglob("test_*.py"), key=lambda each: len(each.name))]
    for file in files:
        text = file.read_text()
        if any(f'"{offer.name}"' in found for found in classes.findall(text)):
            return file
    kits = [file for file in files if classes.search(file.read_text())]
    return next((file for file in kits if module in file.read_text() or ROOT / "examples" in file.parents), None)


def _table(ours: bool) -> str:
    lines = ["| plugin | package | what it is | passes |", "|---|---|---|---|"]
    for readme, offers in readmes().items():
        if is_ours(readme) != ours:
            continue
        folder = importable(readme)
        sys.path.insert(0, folder)
        try:
            lines += [_row(offer, readme, ours) for offer in offers.values()]
        finally:
            sys.path.remove(folder)
    return "\n".join(lines) + "\n"


def _row(offer: EntryPointInfo, readme: Path, ours: bool) -> str:
    _, provider = PluginRegistry([offer]).describe(offer.kind, offer.name)
    assert provider is not None, offer
    place = readme.parent.relative_to(ROOT)
    passes = "its own tests, on a real server"
    if offer.kind in KITS:
        file = proof(offer, (ROOT / "tests",) if ours else (readme.parent / "tests",))
        assert file is not None, f"{offer.title} passes no kit"
        passes = f"`{KITS[offer.kind]}` in [{file.name}](../../{file.relative_to(ROOT)})"
    summary = provider.summary.replace("|", "\\|")
    return f"| `{offer.title}` | [{place.name}](../../{readme.relative_to(ROOT)}) | {summary} | {passes} |"
