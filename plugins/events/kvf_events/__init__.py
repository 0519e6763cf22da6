"""What L1 and the tiers hold, announced to routers in the form of vLLM's events: the listener `events`."""

from __future__ import annotations

from kvf_events.listener import EventsListener
from kvf_events.options import EventsOptions, check
from kvframework.api.listener import ListenerProvider, hookimpl


@hookimpl
def kvf_listeners() -> list[ListenerProvider[EventsOptions]]:
    return [
        ListenerProvider(
            name="events",
            summary="tells routers which blocks of prompts the server holds",
            options=EventsOptions,
            check=check,
            create=EventsListener,
        )
    ]
