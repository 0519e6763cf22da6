"""`kvframework bench route`: a router's memory and time, and what follows for a thousand nodes."""
