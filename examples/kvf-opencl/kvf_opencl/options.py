"""The options of the transport, as they stand in its `[[transport]]` table and in an engine's `transport_options`."""

from __future__ import annotations

from typing import Annotated

from kvframework.api.plugin import Options
from msgspec import Meta


class OpenclOptions(Options, frozen=True):
    """`kvframework plugins info` shows a field's description."""

    platform: Annotated[str, Meta(description="a part of the OpenCL platform's name; empty: the first with SVM")] = ""
