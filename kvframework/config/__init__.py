"""Configuration: one TOML file becomes frozen structs; every mistake is an error with its place."""

from kvframework.api.endpoint import Endpoint, ObserveConfig, parse_endpoint
from kvframework.api.toml import closest, convert, toml_value
from kvframework.config.endpoint import (
    FULL_SUFFIX,
    LIVENESS_SUFFIX,
    check_directory,
    check_private_directory,
    default_endpoint,
    keeper_path,
    prepare_private_directory,
    trusted_server_uid,
)
from kvframework.config.layers import Layers, read_layers
from kvframework.config.load import assemble, load_config
from kvframework.config.schema import (
    Config,
    L2Config,
    L2Keys,
    PluginTable,
    ServerConfig,
    TenantConfig,
)
from kvframework.config.tenants import bytes_of_tenants

__all__ = [
    "FULL_SUFFIX",
    "LIVENESS_SUFFIX",
    "Config",
    "Endpoint",
    "L2Config",
    "L2Keys",
    "Layers",
    "ObserveConfig",
    "PluginTable",
    "ServerConfig",
    "TenantConfig",
    "assemble",
    "bytes_of_tenants",
    "check_directory",
    "check_private_directory",
    "closest",
    "convert",
    "default_endpoint",
    "keeper_path",
    "load_config",
    "parse_endpoint",
    "prepare_private_directory",
    "read_layers",
    "toml_value",
    "trusted_server_uid",
]
