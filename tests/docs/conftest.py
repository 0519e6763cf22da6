"""The site directory of tests/plugins, for the examples of pages."""

from tests.plugins.conftest import site as site
