"""`python -m tests.core.golden.record` writes the golden messages of this release; `--release` marks them as those of a
release that is out, which nobody may write again."""

from __future__ import annotations

import sys

from tests.core.golden.recording import FOLDER, RELEASED, current, this_release, write


def main(arguments: list[str]) -> str:
    release = this_release()
    write(release, current())
    if arguments == ["--release"]:
        (FOLDER / release / RELEASED).touch()
    return f"{FOLDER / release}"


if __name__ == "__main__":
    print(main(sys.argv[1:]))
