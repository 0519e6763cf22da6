"""What help and completion import: the quickest import is none."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kvf_dev.new import KINDS
from kvframework.registry.discovery import KINDS as REGISTERED
from tests.core.cli.command import environment
from tests.core.registry.fake_distributions import install
from tests.support.processes import ran

HEAVY = {"rich", "pydantic", "msgspec", "zmq", "pluggy", "torch", "numpy", "redis", "transformers", "hypothesis"}
OF_A_COMMAND = {"rich", "msgspec", "zmq", "pluggy"}
SHOW = """
import sys
from kvframework.cli.main import main
try:
    main()
except SystemExit as ended:
    assert not ended.code, ended.code
loaded = {name.split('.')[0] for name in sys.modules}
own = {name for name in sys.modules if name.startswith(('kvframework.', 'kvframework_bench'))}
print(*sorted(loaded & set(sys.argv.pop(0).split())), *sorted(own), file=sys.stderr)
"""


def imported(*arguments: str, site: Path | None = None, **variables: str) -> set[str]:
    code = f"import sys; sys.argv = [{' '.join(sorted(HEAVY))!r}, *sys.argv[1:]]\n{SHOW}"
    done = ran(sys.executable, "-c", code, *arguments, env=environment(site, **variables))
    return set(done.stderr.split())


def test_help_imports_no_command() -> None:
    found = imported("--help")
    assert not found & HEAVY
    light = {"api", "api.command", "api.installing", "cli", "errors", "bounded_calls", "text"}
    light |= {"cli.main", "cli.commands", "cli.serving"}
    assert {name for name in found if name.startswith("kvframework")} <= {f"kvframework.{name}" for name in light}


@pytest.mark.parametrize(
    "command", ["hold", "status", "top", "config show", "keys new", "plugins check", "new", "doctor", "demo"]
)
def test_help_of_a_command_imports_no_work_of_plugins(command: str) -> None:
    found = imported(*command.split(), "--help")
    assert not found & (HEAVY - OF_A_COMMAND)
    assert not {name for name in found if name.startswith("kvframework_bench")}


def test_commands_are_completed_without_anything_heavy() -> None:
    words = {"_KVFRAMEWORK_COMPLETE": "complete_bash", "COMP_WORDS": "kvframework st", "COMP_CWORD": "1"}
    assert not imported(**words) & HEAVY


def test_help_imports_no_command_of_another_distribution(site: Path) -> None:
    install(
        site, "acme", {"greet": "acme_greet:app"}, {"acme_greet": "raise SystemExit(9)"}, group="kvframework.commands"
    )
    assert "kvframework.cli.commands" in imported("--help", site=site)


def test_the_kinds_that_help_names_are_those_of_the_registry() -> None:
    assert tuple(REGISTERED) == KINDS
