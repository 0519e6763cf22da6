"""The process that finds the refusals of a whole configuration. Reports a `Finding` a line."""

from __future__ import annotations

import os
import sys

import msgspec

from kvframework.api.options import ByteSize
from kvframework.config import Config
from kvframework.doctor.plugins import refusal
from kvframework.preflight import common_refusals
from kvframework.registry import PluginRegistry


def main() -> None:
    """Reads the configuration, and whether its server runs, from standard input; `argv[1]` is the report's
    descriptor."""
    config, running = msgspec.msgpack.decode(
        sys.stdin.buffer.read(),
        type=tuple[Config, bool],
        dec_hook=lambda kind, value: ByteSize(value) if kind is ByteSize else value,
    )
    for error in common_refusals(config, PluginRegistry(), running=running):
        os.write(int(sys.argv[1]), msgspec.json.encode(refusal(error)) + b"\n")
