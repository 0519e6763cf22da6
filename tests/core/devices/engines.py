"""What the tests ask of an engine of the transport kit."""

from __future__ import annotations

from kvf_dev.testing.transport.engine import PATIENCE_S, KitEngine


def works(engine: KitEngine) -> None:
    """A store and a load of it, bit for bit."""
    request = engine.request()
    assert engine.store(request, engine.source()).result(PATIENCE_S).ok
    assert engine.load(request, engine.target()).result(PATIENCE_S).ok
    engine.expect_loaded(engine.snapshot(), engine.source(), engine.target())
    assert engine.differences() == []
