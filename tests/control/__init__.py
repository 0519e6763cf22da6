"""Orders of gateways and people: `kvframework control`, `prefetch` and `pin` beside a real server."""
