"""What is simulated: a server's configuration, the speed of its tiers, and the engines. Checked by `run.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvframework.config.schema import Config

# Llama-3-8B in 16 bits.
BYTES_PER_TOKEN = 128 << 10


@dataclass(frozen=True)
class Engines:
    """`count` engines, each of which computes one prompt at a time, at the speed of
    `kvframework.pricing.prefill_s`: `attention_tokens` 0 is no attention term.

    A prompt is looked up as it comes; with a `lookahead` near its turn: whenever an engine stands idle, as vLLM's
    scheduler does, and before that as long as fewer than so many prompts for each engine are looked up and wait.
    """

    count: int = 1
    tokens_per_s: float = 25_000.0
    attention_tokens: float = 0.0
    lookahead: int | None = None


@dataclass(frozen=True)
class SlowTime:
    """A tier has `factor` of its speed from `begin_s` to `end_s` of the trace."""

    begin_s: float
    end_s: float
    factor: float


@dataclass(frozen=True)
class TierSpeed:
    """The speed of one `[[l2]]`, in bytes and seconds. `name` is its `use`, with "#2" behind it for the second of that
    name.

    Reads are served one after the other. Writes take their turn among them, or have a way of their own with
    `write_bytes_per_s`; infinite: they take no time. `latency_s` comes to each call. `capacity_bytes` None: endless.
    `has_all`: it has all that an engine ever stored, at once and without a write, whatever the write policy says.
    """

    name: str
    read_bytes_per_s: float
    write_bytes_per_s: float | None = None
    latency_s: float = 0.0
    capacity_bytes: int | None = None
    slow: Sequence[SlowTime] = ()
    has_all: bool = False


@dataclass(frozen=True)
class Settings:
    """`config` is that of the server: of it L1 with its eviction, each `[[l2]]` and `[server]` are simulated. `tiers`
    has a speed for each `[[l2]]`, in any order. `bytes_per_token` is what an object has for each token, of all ranks.

    Without `engines` each request ends before the next begins, and nothing takes an engine's time. `whole_chunks`: as
    engines do, no chunk that the prompt does not fill is looked up or stored; else a trace's last chunk counts as
    whole, as Mooncake's own simulator has it.
    """

    config: Config
    bytes_per_token: int = BYTES_PER_TOKEN
    engines: Engines | None = None
    tiers: Sequence[TierSpeed] = ()
    whole_chunks: bool = True
