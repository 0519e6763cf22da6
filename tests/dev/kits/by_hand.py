"""One test of a kit, called by hand: for planted bugs, of which each has one test that must fail."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import pytest


def call(kit: object, test: str, fixtures: Mapping[str, Any]) -> None:
    """Run the test `name` or `name[parameter]` of `kit` with those of `fixtures` that it takes."""
    name, _, chosen = test.removesuffix("]").partition("[")
    method = getattr(kit, name)
    values = {key: each for key, each in fixtures.items() if key in inspect.signature(method).parameters}
    found: list[dict[str, Any]] = [{}]
    for mark in getattr(method, "pytestmark", ()):
        if mark.name == "parametrize":
            names = mark.args[0].split(",") if isinstance(mark.args[0], str) else mark.args[0]
            rows = [row if len(names) > 1 else (row,) for row in mark.args[1]]
            found = [{**each, **dict(zip(names, row, strict=True))} for each in found for row in rows]
    wanted = [each for each in found if "-".join(map(str, each.values())) == chosen]
    assert len(wanted) == 1, f"no {test}: {[list(each.values()) for each in found]}"
    method(**values, **wanted[0])


def must_fail(kit: object, test: str, fixtures: Callable[[], Mapping[str, Any]], says: str) -> None:
    """Fail unless the test of the kit, or a fixture, fails, and says in one sentence what is wrong."""
    with pytest.raises((AssertionError, pytest.fail.Exception)) as failure:
        call(kit, test, fixtures())
    first = str(failure.value).partition("\nassert ")[0]
    assert says in first, first
    assert len(first) < 400, "a message is no dump"
