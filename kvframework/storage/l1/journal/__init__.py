"""The journal of L1: what it holds, in memory that a keeper holds, so that the next server finds it."""
