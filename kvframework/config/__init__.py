"""Configuration: one TOML file becomes frozen structs; every mistake is an error with its place."""

from kvframework.config.conversion import closest, convert
from kvframework.config.endpoint import (
    Endpoint,
    default_directory,
    default_endpoint,
    parse_endpoint,
    prepare_private_directory,
)
from kvframework.config.load import CONFIG_VARIABLE, load_config
from kvframework.config.schema import Config, L1Config, L2Config, PluginTable, ServerConfig

__all__ = [
    "CONFIG_VARIABLE",
    "Config",
    "Endpoint",
    "L1Config",
    "L2Config",
    "PluginTable",
    "ServerConfig",
    "closest",
    "convert",
    "default_directory",
    "default_endpoint",
    "load_config",
    "parse_endpoint",
    "prepare_private_directory",
]
