"""`kvframework bench l2`: the tiers behind L1, beside what a bare client and plain files reach in the same run.

One module a part (`redis`, `engine`, `disk`, `stalled`, `memory`), each a function from sizes to figures. What a part
needs and does not find is told in the document instead of its figures.
"""
