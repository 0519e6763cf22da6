"""Owns how something of the public surface goes: announced by a warning at its user, gone in a release that is named.

    @deprecated("kvframework.api.old", since="0.2", gone="0.4", instead="kvframework.api.new")
    def old() -> None: ...

What is no function or class (an option, a field, an old form of an argument) calls the same in place:

    deprecated("the option `url` of tier.redis", since="0.2", gone="0.4", instead="`urls`").warn(stacklevel=3)

All arguments are literals: `docs/plugins/compatibility.md` lists what the sources announce, and a test fails once the
package is the release in which something is to be gone.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class deprecated:  # noqa: N801 - used as a decorator
    """`what` goes: warned of from release `since` on, `gone` from that release on; `instead` is what to use."""

    what: str
    since: str
    gone: str
    instead: str

    def __call__(self, target: F) -> F:
        """A function that warns its callers; of a class, itself, which warns whoever makes one of it."""
        called: Callable[..., Any] = target.__init__ if isinstance(target, type) else target  # type: ignore[misc]

        @functools.wraps(called)
        def warning(*args: Any, **kwargs: Any) -> Any:
            self.warn(stacklevel=3)
            return called(*args, **kwargs)

        if not isinstance(target, type):
            return warning  # type: ignore[return-value]
        target.__init__ = warning  # type: ignore[misc]
        return target

    def warn(self, *, stacklevel: int = 2) -> None:
        """Warns; `stacklevel` 2 blames the caller of this, as in `warnings.warn`. Never raises of itself."""
        warnings.warn(str(self), DeprecationWarning, stacklevel=stacklevel)

    def __str__(self) -> str:
        return f"{self.what} is deprecated since kvframework {self.since} and gone in {self.gone}: use {self.instead}"
