"""Plugin machinery: static discovery, guarded loading, one registry. Used by server, client and CLI at startup."""
