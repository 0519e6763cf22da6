"""`kvframework bench policy`: what eviction costs a block, and what hit rate a policy has on a trace."""
