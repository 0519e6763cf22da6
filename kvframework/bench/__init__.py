"""`kvframework bench`: what this machine reaches bare, and what the framework reaches beside it, in the same run.

One module a bench (`host`, `lookup`, `store`), each a function from options to a document of figures. The process of
the command is the engine; servers and bare peers are its children. Nothing here runs in a server.
"""
