"""`python -m kvframework_bench.peers`: what the peers tier moves beside bare TCP, LOOKUPs of a server that lends, and a
simulated fleet that finds its KV by hints. docs/peers.md and docs/fleet.md have the figures.
"""
