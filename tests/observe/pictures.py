"""Makes the pictures of the page: `python -m tests.observe.pictures [FOLDER]`, in docs/images. Needs Chromium."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.observe.fleet import Fleet
from tests.support.browser import SLOW_S, Browser
from tests.support.waiting import wait_until

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "images"


def main(folder: Path, widths: tuple[int, ...], height: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with Fleet() as fleet, Browser() as browser:
        for width in widths:
            for dark in (False, True):
                browser.shape(width, dark=dark)
                browser.open(fleet.url)
                wait_until(lambda: "Instances" in browser.text(), SLOW_S, "the page")
                name = f"page-{'dark' if dark else 'light'}{'' if width == widths[0] else f'-{width}'}.png"
                browser.picture(folder / name, height=height)
        print("\n".join(browser.said))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]), (1280, 360), 0)
    else:
        main(FOLDER, (1000,), 660)
