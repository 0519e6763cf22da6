"""The errors of `kvframework trace`, `simulate` and `plan`."""

from __future__ import annotations

from kvframework.errors import KVFrameworkError


class TraceError(KVFrameworkError, ValueError, code="trace.invalid"):
    """A file of requests is no trace, of a format that is not read, or wrong at the place that it names.

    What to do: correct the place that it names, or give a trace of a format in traces.md."""


class SimulationError(KVFrameworkError, ValueError, code="simulation.settings"):
    """A simulation cannot be made: a setting is missing, out of bounds, or does not fit another.

    What to do: change the setting that it names."""


class PlanError(KVFrameworkError, ValueError, code="plan.invalid"):
    """`kvframework plan` is asked for something that does not exist, or that the trace cannot tell.

    What to do: correct the option that it names."""
