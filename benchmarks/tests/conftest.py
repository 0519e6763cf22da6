"""The same rules as for the tests of the core: skips with a reason, soaks on request, no deadlines of examples."""

from __future__ import annotations

from tests.conftest import pytest_collection_modifyitems, pytest_configure

__all__ = ["pytest_collection_modifyitems", "pytest_configure"]
