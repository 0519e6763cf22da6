"""`kvframework bench l2`: the tiers behind L1, next to a plain client, plain TCP and plain files in the same run.

One module a part (`redis`, `mooncake`, `engine`, `disk`, `stalled`, `memory`), each a function from sizes to figures. A
part that lacks something on this machine is named in the document instead of its figures.
"""
