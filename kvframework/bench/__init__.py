"""`kvframework bench`: what this machine reaches bare, and what the framework reaches beside it, in the same run.

One module or folder a bench (`host`, `lookup`, `store`, `l2`, `scale`, `contention`), each a function from options to a
document of figures; `tables` and `plot` show them. The process of the command is the engine; servers, bare peers and
other clients are its children. Nothing here runs in a server.
"""
