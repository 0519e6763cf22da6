"""The commands `kvframework trace record` and `info`."""
