"""Traces of requests (`trace`), their replay against a configuration in virtual time (`simulation`), and the size of a
cache for a goal (`planning`), with their commands (`cli`)."""
