"""A trace of requests through the server's own storage and service, under a virtual clock: what it would find, how long
engines would wait for their first tokens, and what its tiers would read and write.

    outcome = simulate(open_trace("trace.jsonl"), Settings(load_config(Path("kvf.toml"))))

`simulate` (`run.py`) takes a trace and `Settings` (`settings.py`) and returns an `Outcome` (`outcome.py`). It is pure:
it opens no file and no socket, starts no thread and reads no clock; the same input gives the same outcome. It blocks
for about 2 s for each hundred thousand chunks of the trace, and 10 s more for as many that go to a tier or come from
one. Raises `ConfigError` and `PluginError` for a
configuration that no server could start with, and `SimulationError` for settings that cannot be met.
"""

from kvf_plan.simulation.requests import Outcome
from kvf_plan.simulation.run import simulate
from kvf_plan.simulation.settings import Engines, Settings, SlowTime, TierSpeed

__all__ = ["Engines", "Outcome", "Settings", "SlowTime", "TierSpeed", "simulate"]
