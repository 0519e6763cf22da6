"""`kvframework bench contention`: an engine while other processes want the same machine, and the cost of a hit.

Three parts, each with separate processes: `spinning` (stores and retrieves next to spinning cores), `storing`
(lookups next to a client that stores at full speed), `hit` (the engine's processor time for one hit). The
disturbance is a child process of the benchmark, on and off within each round.
"""
