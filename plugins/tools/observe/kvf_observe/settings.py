"""What keeps `kvframework observe` from starting, for the command, `serve`, `config check` and `doctor`."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from kvf_observe.http import messages
from kvframework.api.endpoint import ObserveConfig, collector_url
from kvframework.api.installing import install_command
from kvframework.errors import KVFrameworkError, PluginUnavailable

_EXPORTER = "opentelemetry.exporter.otlp.proto.http"


def refusals(config: ObserveConfig, where: str, *, running: bool = False) -> Iterator[KVFrameworkError]:
    """Yield every error with which the process would refuse to start; with `running`, its port may be that of one that
    runs. Creates nothing. Blocking: reads files, binds the port for a moment."""
    try:
        _check_traces(config, where)
    except KVFrameworkError as error:
        yield error
    yield from messages.refusals(config, where, running=running)


def _check_traces(config: ObserveConfig, where: str) -> None:
    if not config.traces:
        return
    collector_url(config.traces, where=where)
    # A parent that is absent makes `find_spec` of its child an error.
    if not (find_spec("opentelemetry") and find_spec("opentelemetry.exporter") and find_spec(_EXPORTER)):
        raise PluginUnavailable(
            "the option `traces` needs OpenTelemetry, which is not installed",
            where=where,
            hint=install_command("otel", distribution="kvframework-observe"),
        )
