"""Owns the form in which the inspecting process reports."""

from __future__ import annotations

from msgspec import Struct

from kvframework.inspection.problems import Problem


class Line(Struct, omit_defaults=True):
    """One line of the report: what comes next, what was found, or what could not be looked at and why."""

    step: str = ""
    problem: Problem | None = None
    note: str = ""
    provider: str = ""
