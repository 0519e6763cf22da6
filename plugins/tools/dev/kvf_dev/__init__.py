"""What authors of plugins use: conformance kits (`testing`), `kvframework plugins check` (`inspection`), and
`kvframework new` (`scaffold`)."""
