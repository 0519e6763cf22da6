"""`kvframework demo`: real processes that show what the server does, on models made here."""
