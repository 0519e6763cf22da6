"""The errors of blend. Raised on both sides; they travel whole."""

from __future__ import annotations

from kvframework.errors import KVFrameworkError


class BadRotary(KVFrameworkError, ValueError, code="kvf_blend.rotary"):
    """The rotary parameters are missing, contradictory or of an unsupported kind.

    What to do: pass the model's own parameters; with an unsupported kind, compute the whole prompt.
    """


class BadSegments(KVFrameworkError, ValueError, code="kvf_blend.segments"):
    """The separator or the ranges do not mark segments of this prompt.

    What to do: mark non-empty segments inside the prompt, in order and without overlap.
    """


class BlendRefused(KVFrameworkError, ValueError, code="kvf_blend.layout"):
    """KV of this layout or model cannot be moved to another position.

    What to do: use kvframework without blend for this model; lookups of prefixes still work.
    """
