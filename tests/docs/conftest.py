"""The site directory of tests/plugins, for the examples of pages."""

from tests.registry.conftest import site as site
