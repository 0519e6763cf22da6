"""`kvframework top`: a live screen about a running server. Its state is pure; the terminal is touched by
`terminal.py` alone."""
