"""Draws the fleet's dashboard from the answers of a real Prometheus over three servers under load, one of which ends:
`PYTHONPATH=. python deploy/grafana/fleet_picture.py [FILE]`, in docs/images. Needs Prometheus, matplotlib, and nine
minutes."""

from __future__ import annotations

import itertools
import json
import random
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvframework.api.keys import tenant_digest
from kvframework.pricing import EngineSpeed
from kvframework.wire import messages as m
from tests.observe.promtool import RULES
from tests.observe.test_prometheus import FLEET, Prometheus, filled, prometheus
from tests.support.observe_process import ObserveProcess
from tests.support.redis_server import RedisServer
from tests.support.server_process import ServerProcess
from tests.support.wire_client import WireClient, key_for

FILE = RULES.parents[2] / "docs" / "images" / "fleet.png"
# Rates of five minutes are whole after that.
SHOWN_S, ENDS_S, LOAD_S, STEP_S, PAUSE_S = 310.0, 400.0, 520.0, 2, 0.05
MODELS = {"Qwen3-8B": 16, "Llama-3.1-8B": 8}
TENANTS = {"search": "of search", "chat": "of chat"}


class Engine:
    """An engine of every model at one server."""

    def __init__(self, client: WireClient) -> None:
        self.models = [
            (model, client.register(number, model_name=model, hidden_dim_size=width))
            for number, (model, width) in enumerate(MODELS.items(), 1)
        ]
        self.client = client

    def ask(self, chance: random.Random, newest: int) -> None:
        """One request of a model and a tenant: one of the last prompts, so that part of them is found."""
        number = chance.randrange(len(self.models))
        model, registered = self.models[number]
        prompt = max(newest - int(chance.expovariate(1 / 40)), 0)
        salt = chance.choice([*TENANTS.values(), ""])
        key = key_for(registered, [prompt] * 256 * chance.randint(1, 8), model_name=model, cache_salt=salt)
        whole = msgspec.structs.replace(key, worker_id=None)
        speed = EngineSpeed(20_000.0 / (1 + number))
        reply = self.client.settled(self.client.call("LOOKUP", m.Lookup(whole, speed=speed)))
        if reply.ticket:
            self.client.call("FREE_LOOKUP_LOCKS", m.TicketRef(reply.ticket))
        if reply.hit_tokens < key.end:
            self.client.store(key, b"x", 1 + number)
        else:
            self.client.retrieve(key, 1 + number)


def draw(axes: Axes, panel: dict[str, Any], running: Prometheus, span: tuple[float, float]) -> None:
    axes.set_title(panel["title"], fontsize=8, loc="left")
    unit = panel["fieldConfig"]["defaults"]["unit"]
    if panel["type"] != "timeseries":
        axes.axis("off")
        text = "\n".join(rows(panel, running, percent=unit == "percentunit")) or "no series"
        axes.text(0, 1, text, fontsize=7, va="top", family="monospace")
        return
    for target in panel["targets"]:
        place = f"query_range?query={quote(filled(target['expr']))}&start={span[0]}&end={span[1]}&step={STEP_S}"
        for series in running.ask(place)["result"]:
            legend = target["legendFormat"]
            for label in re.findall(r"{{(\w+)}}", legend):
                legend = legend.replace(f"{{{{{label}}}}}", series["metric"].get(label, ""))
            points = [(float(at) - span[0], float(value)) for at, value in series["values"] if value != "NaN"]
            if points:
                axes.plot(*zip(*points, strict=True), label=legend, linewidth=1)
    axes.set_ylim(0, 1.1 * axes.dataLim.y1 or 1)
    axes.tick_params(labelsize=7)
    axes.legend(fontsize=6, loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2, frameon=False)
    axes.set_xlabel("seconds", fontsize=6)
    axes.set_ylabel({"percentunit": "share", "s": "seconds"}.get(unit, ""), fontsize=6)


def rows(panel: dict[str, Any], running: Prometheus, *, percent: bool) -> Iterator[str]:
    """A line for each series, as a table has a row."""
    for target in panel["targets"]:
        for series in running.ask(f"query?query={quote(filled(target['expr']))}")["result"]:
            labels = ", ".join(value for name, value in series["metric"].items() if name != "__name__")
            value = float(series["value"][1])
            yield f"{labels} {target['legendFormat']}".strip() + (f": {value:.1%}" if percent else f": {value:.4g}")


def main(file: Path) -> None:
    dashboard = json.loads((RULES.parents[1] / "grafana" / "kvframework-fleet.json").read_text())
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        redis = stack.enter_context(RedisServer(folder))
        tenants = [f"tenants.{name}.salts=['{tenant_digest(salt)}']" for name, salt in TENANTS.items()]
        settings = ("l2.0.use=redis", f"l2.0.url={redis.url}", *tenants)
        servers = [stack.enter_context(ServerProcess(*settings, capacity="32MiB")) for _ in range(3)]
        observed = [stack.enter_context(ObserveProcess(server.endpoint)) for server in servers]
        engines = [Engine(stack.enter_context(server.client())) for server in servers]
        targets = json.dumps([each.url.removeprefix("http://") for each in observed])
        running = stack.enter_context(prometheus(FLEET.format(rules=RULES, targets=targets), folder))
        chance, began = random.Random(7), time.time()  # noqa: S311  a load, no secret
        for newest in itertools.count():
            for engine in engines:
                engine.ask(chance, newest // 3)
            time.sleep(PAUSE_S)
            at = time.time() - began
            if len(engines) == len(servers) and at > ENDS_S:
                engines.pop()
                servers[-1].kill9()
            if at > LOAD_S:
                break
        figure = Figure(figsize=(13, 12), layout="constrained")
        places, panels = figure.subplots(4, 3).flat, dashboard["panels"]
        for axes in places[len(panels) :]:
            axes.axis("off")
        for axes, panel in zip(places, panels, strict=False):
            draw(axes, panel, running, (began + SHOWN_S, time.time()))
        figure.savefig(file, dpi=75)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else FILE)
