"""Benchmarks of kvframework: the figures of the bare machine, and of the framework in the same run.

One module or folder a bench (`host`, `lookup`, `store`, `l2`, `scale`, `contention`, `cuda`), each a function from
options to a document of figures; `tables` and `plot` show them. The process of the command is the engine; servers,
references and other clients are its children. Nothing here runs in a server.
"""

__version__ = "0.3.0.dev0"
