"""The server's half: what each CB_* request answers. Imports neither torch nor the client."""
