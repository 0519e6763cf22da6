"""`kvframework bench shards`: what objects that are shards cost an engine of fewer ranks than the fleet allows."""
