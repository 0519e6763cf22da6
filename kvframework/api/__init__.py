"""The plugin API, one module a kind: `kvframework.api.tier`, `.memory`, `.layout`, ... Each module names in `__all__`
the public names; docs/plugins/compatibility.md has their guarantees."""
