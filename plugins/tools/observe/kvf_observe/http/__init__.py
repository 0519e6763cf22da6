"""What processes that answer HTTP share: the server, who may ask, and the text of metrics. Not the cache's own server,
which speaks no HTTP."""
