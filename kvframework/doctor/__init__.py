"""The checks of `kvframework doctor`: faults of this machine, installation and configuration. Each check reports its
findings, and changes nothing. Each process of a check imports only what it needs, so nothing is imported here."""
