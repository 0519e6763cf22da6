"""Configuration: one TOML file becomes frozen structs; every mistake is an error with its place."""

from kvframework.api.endpoint import Endpoint, ObserveConfig, collector_url, parse_endpoint, parse_listen
from kvframework.api.toml import closest, convert, toml_value
from kvframework.config.endpoint import (
    FULL_SUFFIX,
    LIVENESS_SUFFIX,
    check_directory,
    check_private_directory,
    default_directory,
    default_endpoint,
    ipc_path,
    keeper_path,
    prepare_private_directory,
    trusted_server_uid,
)
from kvframework.config.layers import FIELD_DEFAULT, Layers, apply_override, read_layers
from kvframework.config.load import assemble, load_config
from kvframework.config.schema import (
    Config,
    L2Config,
    L2Keys,
    LogConfig,
    PluginTable,
    ServerConfig,
    TenantConfig,
)
from kvframework.config.tenants import bytes_of_tenants, shares_of_tenants, tenant_digest

__all__ = [
    "FIELD_DEFAULT",
    "FULL_SUFFIX",
    "LIVENESS_SUFFIX",
    "Config",
    "Endpoint",
    "L2Config",
    "L2Keys",
    "Layers",
    "LogConfig",
    "ObserveConfig",
    "PluginTable",
    "ServerConfig",
    "TenantConfig",
    "apply_override",
    "assemble",
    "bytes_of_tenants",
    "check_directory",
    "check_private_directory",
    "closest",
    "collector_url",
    "convert",
    "default_directory",
    "default_endpoint",
    "ipc_path",
    "keeper_path",
    "load_config",
    "parse_endpoint",
    "parse_listen",
    "prepare_private_directory",
    "read_layers",
    "shares_of_tenants",
    "tenant_digest",
    "toml_value",
    "trusted_server_uid",
]
