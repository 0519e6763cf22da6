"""No test may judge the speed of the machine that it runs on."""

from __future__ import annotations

from hypothesis import HealthCheck, settings


def test_an_example_of_hypothesis_may_take_any_time() -> None:
    assert settings.default.deadline is None
    assert HealthCheck.too_slow in settings.default.suppress_health_check
