"""Traces of requests: when each came, how long it was and which chunks it shares with others, never what it said."""
