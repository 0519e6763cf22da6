"""The errors of `kvframework trace`, `simulate` and `plan`."""

from __future__ import annotations

from kvframework.errors import KVFrameworkError


class TraceError(KVFrameworkError, ValueError, code="trace.invalid"):
    """A trace file has an unknown format, or a wrong value at the place that the error names.

    What to do: correct that place, or pass a trace in one of the formats of `docs/traces.md`."""


class SimulationError(KVFrameworkError, ValueError, code="simulation.settings"):
    """A setting of the simulation is missing, out of bounds, or contradicts another setting.

    What to do: change the setting that the error names."""


class PlanError(KVFrameworkError, ValueError, code="plan.invalid"):
    """An option of `kvframework plan` names something unknown, or needs what the trace lacks.

    What to do: correct the option that the error names."""
