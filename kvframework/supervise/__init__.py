"""Child processes: their start, their end, their next start."""
