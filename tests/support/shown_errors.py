"""What of an error a log could show."""

from __future__ import annotations

import traceback


def all_text(error: BaseException) -> str:
    """Its traceback, and the texts of all that it came from."""
    shown = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    chain: list[BaseException] = [error]
    while (nearest := chain[-1].__cause__ or chain[-1].__context__) is not None:
        chain.append(nearest)
    return shown + "".join(f"{each!s} {each!r} {each.args!r}" for each in chain)
