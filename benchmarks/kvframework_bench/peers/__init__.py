"""`python -m kvframework_bench.peers`: what the peers tier moves beside bare TCP, and LOOKUPs of a server that lends.
docs/peers.md has the figures.
"""
