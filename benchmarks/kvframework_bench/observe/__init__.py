"""`kvframework bench observe`: what it costs a server to be observed, explained, and to remember what left L1."""
