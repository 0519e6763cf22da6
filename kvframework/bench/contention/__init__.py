"""`kvframework bench contention`: what an engine reaches while others want the same machine, and what a hit costs its
own process.

Three parts, each with processes of its own: `spinning` (stores and retrieves beside spinning cores), `storing` (lookups
beside a client that stores at full speed), `hit` (the engine's processor time for one hit). What disturbs is a child
process of the bench, on and off within each round.
"""
