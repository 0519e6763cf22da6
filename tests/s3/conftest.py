"""Fixtures that tests of other folders have, too."""

from __future__ import annotations

from tests.support.demo import temporary as temporary
from tests.tiers.conftest import seed as seed
