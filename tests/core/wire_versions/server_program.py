"""`kvframework serve` of another release."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

from kvframework.cli.main import main
from tests.core.wire_versions.other_release import become

if __name__ == "__main__":
    become()
    main()
