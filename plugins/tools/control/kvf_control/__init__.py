"""Orders about KV from gateways and people: `kvframework prefetch` and `pin`, and `kvframework control`, a separate
process that takes them over HTTP. An order is carried out by lookups ahead of their requests, over one connection to
the server: such a lookup loads a run of chunks, pins it, and says what is to be expected of it."""
