"""The errors of blend. Raised on both sides; they travel whole."""

from __future__ import annotations

from kvframework.errors import KVFrameworkError


class BadRotary(KVFrameworkError, ValueError, code="kvf_blend.rotary"):
    """The rotary parameters are missing, contradictory or of a kind that keys cannot be rotated by.

    What to do: give the model's own parameters; kinds that are not listed are computed in full.
    """


class BadSegments(KVFrameworkError, ValueError, code="kvf_blend.segments"):
    """The separator or the ranges do not mark segments of this prompt.

    What to do: mark them as the text says: in order, without overlap, inside the prompt, none empty.
    """


class BlendRefused(KVFrameworkError, ValueError, code="kvf_blend.layout"):
    """KV of this layout or model cannot be moved to another position.

    What to do: use the framework without blend for it; prefixes are found as always.
    """
