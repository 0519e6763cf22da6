"""What the doctor tells of configured plugins, whatever they do to the process that asks them."""

from __future__ import annotations

import os
import re
import resource
import sys
from pathlib import Path

import pytest

from tests.core.doctor.tables import ask, ask_a_silent_one, levels
from tests.core.registry.fake_distributions import install

SOURCE = """
import atexit, os, threading, time
from kvf_devices import DeviceTransportProvider
from kvframework.api.plugin import hookimpl
from kvframework.api.plugin import Finding
from kvframework.api.memory import MemoryProvider
from kvframework.api.tier import TierProvider
from kvframework.api.transport import TransportProvider
from kvframework.errors import TierError
def seen(options, context, deadline):
    print("noise")
    return [Finding("acme.disk", "warn", f"seen from {context.where}, {deadline - time.monotonic() > 0}", "clean it")]
def raises(options, context, deadline):
    raise TierError("no disk", where="acme", hint="buy one")
def breaks(options, context, deadline):
    yield Finding("acme.first", "ok", "before")
    raise ValueError("broken")
def dies(options, context, deadline):
    yield Finding("acme.first", "ok", "before")
    os.abort()
def hangs(options, context, deadline):
    time.sleep(600)
def lingers(options, context, deadline):
    atexit.register(os.abort)
    threading.Thread(target=time.sleep, args=(600,)).start()
    return [Finding("acme.disk", "ok", "all is well")]
def nonsense(options, context, deadline):
    return [Finding("acme", "awful", 7)]
def text(options, context, deadline):
    return ["text"]
def nothing(options, context, deadline):
    return None
def single(options, context, deadline):
    return Finding("acme.disk", "ok", "all is well")
@hookimpl
def kvf_tiers():
    def tier(name, diagnose, **fields):
        return TierProvider(name=name, summary=name, create=print, diagnose=diagnose, **fields)
    return [
        tier("seen", seen), tier("raises", raises), tier("breaks", breaks), tier("dies", dies), tier("hangs", hangs),
        tier("lingers", lingers), tier("nonsense", nonsense), tier("text", text), tier("nothing", nothing),
        tier("single", single), tier("quiet", None), tier("absent", seen, probe=lambda: "no such device"),
    ]
@hookimpl
def kvf_memories():
    return [MemoryProvider(name="memory", summary="m", create=print, diagnose=seen)]
"""
NAMES = re.findall(r'tier\("(\w+)"', SOURCE)


@pytest.fixture(autouse=True)
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    entry_points = dict.fromkeys((f"tier.{name}" for name in NAMES), "acme_tiers")
    entry_points |= {"memory.memory": "acme_tiers", "tier.abort": "acme_abort"}
    install(tmp_path, "acme", entry_points, {"acme_tiers": SOURCE, "acme_abort": "import os; os.abort()"})
    return tmp_path


def test_a_tier_tells_what_it_sees() -> None:
    found = ask("seen")
    assert levels(found) == {"plugin.usable": "ok", "acme.disk": "warn"}
    assert found["acme.disk"].fact == "seen from kvf.toml: [[l2]] #1, True"
    assert found["acme.disk"].advice == "clean it"
    assert levels(ask("quiet")) == {"plugin.usable": "ok"}


@pytest.mark.parametrize(
    ("name", "level", "text"),
    [
        ("raises", {"plugin.diagnose": "fail"}, "acme: no disk"),
        ("breaks", {"acme.first": "ok", "plugin.diagnose": "fail"}, "ValueError: broken"),
        ("dies", {"acme.first": "ok", "plugin.diagnose": "fail"}, "was ended by signal SIGABRT"),
        ("nonsense", {"plugin.diagnose": "fail"}, "diagnosis failed with ValidationError: "),
        ("text", {"plugin.diagnose": "fail"}, "diagnosis failed with ValidationError: "),
        ("nothing", {"plugin.diagnose": "fail"}, "diagnosis failed with TypeError: "),
        ("single", {"plugin.diagnose": "fail"}, "diagnosis failed with TypeError: "),
    ],
)
def test_what_goes_wrong_in_a_diagnosis_is_a_finding(name: str, level: dict[str, str], text: str) -> None:
    found = ask(name)
    assert levels(found) == {"plugin.usable": "ok"} | level
    assert text in found["plugin.diagnose"].fact
    assert found["plugin.diagnose"].advice


def test_a_diagnosis_that_hangs_is_ended() -> None:
    found = ask_a_silent_one("hangs", "plugin.diagnose")
    assert levels(found) == {"plugin.usable": "ok", "plugin.diagnose": "fail"}
    assert "did not end within" in found["plugin.diagnose"].fact


def test_what_a_library_does_at_the_end_of_its_process_is_no_finding() -> None:
    assert levels(ask("lingers")) == {"plugin.usable": "ok", "acme.disk": "ok"}


def test_what_cannot_be_used_says_why() -> None:
    advice = ask("seem")["plugin.not_found"].advice
    assert advice.startswith("expected: abort, absent, ")
    assert advice.endswith("; hint: did you mean 'seen'?")
    assert "no such device" in ask("absent")["plugin.unavailable"].fact
    assert "SIGABRT" in ask("abort")["plugin.usable"].fact
    wrong = ask("memory")  # for [l1] only
    assert levels(wrong) == {"plugin.wrong_kind": "fail"}
    option = ask("seen", size=3)["config.field"]
    assert (option.level, option.fact) == ("fail", "unknown key 'size'")


def test_memory_that_a_server_has_taken_already_is_not_asked_for() -> None:
    assert levels(ask("memory", kind="memory")) == {"plugin.usable": "ok", "acme.disk": "warn"}
    assert levels(ask("memory", kind="memory", replaces=os.getpid())) == {"plugin.usable": "ok"}
    assert levels(ask("seen", replaces=os.getpid())) == {"plugin.usable": "ok", "acme.disk": "warn"}


def test_a_transport_that_pins_wants_to_lock_memory(site: Path) -> None:
    source = """
    from kvf_devices import DeviceTransportProvider
    from kvframework.api.plugin import hookimpl
    from kvframework.api.plugin import Finding
    from kvframework.api.transport import TransportProvider
    @hookimpl
    def kvf_transports():
        def transport(name):
            return TransportProvider(name=name, summary=name, create=print, is_gpu=name == "gpu")
        return [transport("gpu"), transport("cpu")]
    """
    install(site, "bolt", {"transport.gpu": "bolt_gpu", "transport.cpu": "bolt_gpu"}, {"bolt_gpu": source})
    before = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, before[1]))
    try:
        found = ask("gpu", kind="transport")
        assert levels(ask("cpu", kind="transport")) == {"plugin.usable": "ok"}
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, before)
    assert levels(found) == {"plugin.usable": "ok", "limits.memlock": "warn"}
    assert found["limits.memlock"].fact == "a process may lock 64.0 KiB of memory, but transport gpu locks all of L1"
    assert "LimitMEMLOCK=infinity" in found["limits.memlock"].advice


def test_a_device_transport_tells_of_its_devices(site: Path) -> None:
    source = """
    from kvf_devices import DeviceTransportProvider
    from kvframework.api.plugin import hookimpl
    from kvframework.api.plugin import Finding
    def diagnose(options, context, deadline):
        yield Finding("bolt.driver", "warn", f"seen from {context.where} with {options.stall_s}", "update it")
    @hookimpl
    def kvf_transports():
        return [
            DeviceTransportProvider(
                name="bolt", summary="b", create_engine=print, create_copier=print, is_gpu=False, diagnose=diagnose
            )
        ]
    """
    install(site, "bolt", {"transport.bolt": "bolt_dev"}, {"bolt_dev": source})
    found = ask("bolt", kind="transport", stall_s=7.0)
    assert levels(found) == {"plugin.usable": "ok", "bolt.driver": "warn"}
    assert found["bolt.driver"].fact.endswith("with 7.0")


def test_nothing_of_it_comes_into_this_process() -> None:
    ask("seen")
    assert "acme_tiers" not in sys.modules
