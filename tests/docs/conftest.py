"""The site directory of tests/core/registry, for the examples of pages."""

from tests.core.registry.conftest import site as site
