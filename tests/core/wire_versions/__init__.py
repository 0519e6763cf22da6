"""Clients and servers of other versions, as real processes: they work together by negotiation, or one refuses the other
in both logs, in `status` and by a counter. Never a cache that is silently never hit."""
