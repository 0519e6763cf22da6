"""`kvframework bench node`: what a busy node's server does for its engines.

A real server, and the clients of engines with tensor parallelism, simulated in the benchmark's process: each has a
socket, a session and a separate liveness socket, but computes and copies nothing (`clients`). Requests come at times
that do not follow from the answers (`run`).
"""
