"""Configuration: one TOML file becomes frozen structs; every mistake is an error with its place."""
