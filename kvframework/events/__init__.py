"""What the server tells routers: which blocks of which prompts L1 and the tiers hold.

The serving thread and the storage threads hand facts to `feed`; one thread, `publisher`, makes of them what routers
read. All else is pure.
"""
