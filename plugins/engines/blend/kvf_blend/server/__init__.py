"""The server's half: the handlers of the CB_* requests. Imports neither torch nor the client."""
