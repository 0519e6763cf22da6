"""All that a plugin may import, one module a kind: `kvframework.api.tier`, `.memory`, `.layout`, ... Each names in
`__all__` what its authors use; docs/plugins/compatibility.md says what that promises."""
