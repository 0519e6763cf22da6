"""`kvframework bench compare`: what got slower or faster between two documents of `--json`."""
