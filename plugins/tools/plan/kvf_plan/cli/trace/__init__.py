"""The commands `kvframework trace record`, `info` and `convert`."""
