"""What outlives a server: descriptors that a keeper, systemd or `kvframework hold`, has while no server lives. The
standard library only: the process of `kvframework hold` imports nothing else."""
