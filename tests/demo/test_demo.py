"""`kvframework demo`, the real thing with a tiny model: server, engines, and the tokens. The demo over a long text: the
pieces that it is computed in, and its own end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from kvf_demo.processes import DemoChild, DemoFailed, EngineProcess, HeldServerProcess, uninterrupted
from kvf_demo.result import DemoResult, EngineRun, Recovered
from kvf_demo.view import DemoView
from kvframework.api.installing import install_command
from tests.core.cli.command import run
from tests.support.demo import demo, left_behind
from tests.support.waiting import wait_until

SMALL = ["--size", "tiny", "--tokens", "600", "--new-tokens", "8"]


@pytest.mark.transformers
def test_the_prefix_comes_from_the_tier_after_the_server_was_killed(temporary):
    done = demo(temporary, *SMALL, "--json", "--l2", "disk")
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout)
    assert result["l2"] == "disk"
    assert result["cold"]["hit_tokens"] == 0
    assert result["warm"]["hit_tokens"] == 512
    assert result["tokens_equal"]
    assert result["ok"]
    # Two chunks, and the record of their namespace.
    assert "waiting until the disk has all objects  3 values" in done.stderr
    assert "killing the server" in done.stderr
    assert left_behind(temporary) == []


@pytest.mark.transformers
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--text", "/nowhere"], "/nowhere"),
        (["--text", sys.executable], "not UTF-8"),
        (["--model", "/nowhere"], "/nowhere: unknown model"),
        (["--model", sys.executable], "the file is not a GGUF file"),
        (["--model", "/etc"], "/etc: transformers does not load this model"),
        (["--kill", "--l2", "disk"], "give only one"),
        (["--set", "path=/tmp/x"], "--l2"),
        (["--l2", "disk", "--set", "path=/tmp/x"], "--set needs a tier plugin"),
        (["--l2", "filesystm", "--size", "tiny"], "did you mean 'filesystem'?"),
        (["--l2", "filesystem", "--set", "pth=/tmp/x", "--size", "tiny"], "unknown key 'pth'"),
        (["--l1-capacity", "a lot", "--size", "tiny"], "a lot"),
        (["--size", "tiny", "--tokens", "100"], "more than 256"),
    ],
)
def test_errors_have_status_2_and_say_what_to_do(temporary, arguments, text):
    done = run("demo", *arguments, TMPDIR=str(temporary))
    assert done.returncode == 2, done.stdout + done.stderr
    assert text in done.stderr
    assert "Traceback" not in done.stderr.split("the end of its log")[0]
    assert left_behind(temporary) == []


def test_a_missing_extra_names_the_command_that_installs_it(temporary):
    script = temporary / "without_torch.py"
    script.write_text(
        "import sys\n"
        "sys.modules['torch'] = None\n"
        "from kvframework.cli.main import main\n"
        "sys.argv = ['kvframework', 'demo']\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 2
    assert "torch" in done.stderr
    assert install_command(distribution="kvframework-demo") in done.stderr


def test_the_cli_process_imports_no_torch():
    script = (
        "import sys, kvframework.cli.main, kvf_demo.stage\n"
        "print(sorted({name.split('.')[0] for name in sys.modules} & {'torch', 'transformers', 'kvf_transformers'}))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=240, check=True)
    assert done.stdout.strip() == "[]"


def test_it_passes_only_with_a_hit_and_equal_tokens():
    def status(hit, cold, warm):
        return DemoResult(EngineRun(tokens=cold), EngineRun(hit_tokens=hit, tokens=warm)).exit_status

    assert status(256, [1, 2], [1, 2]) == 0
    assert status(0, [1, 2], [1, 2]) == 1
    assert status(256, [1, 2], [1, 3]) == 1
    assert status(256, [1, 2], [1]) == 1
    assert status(256, [], []) == 1


@pytest.mark.parametrize(
    ("warm", "text"),
    [
        (EngineRun(hit_tokens=0, tokens=[1], prompt_tokens=9, ttft_s=1.0), "No hit: engine B computed the whole"),
        (EngineRun(hit_tokens=8, tokens=[2], prompt_tokens=9, ttft_s=1.0), "NOT equal to"),
        (EngineRun(hit_tokens=8, tokens=[1], prompt_tokens=9, ttft_s=1.0), "are equal to"),
    ],
)
def test_the_verdict_is_shown(warm, text):
    console = Console(record=True, width=100, file=open(os.devnull, "w"))  # noqa: SIM115
    with console.file:
        DemoView(console).show(DemoResult(EngineRun(tokens=[1], prompt_tokens=9, ttft_s=4.0), warm))
        shown = console.export_text()
    assert text in shown
    assert "4.0 times shorter" in shown


@pytest.mark.parametrize(
    ("found", "hit", "text"),
    [
        (Recovered(31, 31 << 20, 0.012, hit_s=0.63), 8, "31 objects, 31.0 MiB, in 0.01 s; 0.63 s after the kill B had"),
        (Recovered(31, 31 << 20, 0.012, hit_s=0.63), 0, "31 objects, 31.0 MiB, in 0.01 s.\n"),
        (Recovered(0, 0, 0.0, "damaged: the journal's identity"), 0, "began with an empty L1: damaged: the journal's"),
    ],
)
def test_what_the_new_server_had_is_shown(found, hit, text):
    console = Console(record=True, width=100, file=open(os.devnull, "w"))  # noqa: SIM115
    with console.file:
        run = EngineRun(hit_tokens=hit, tokens=[1], prompt_tokens=9, ttft_s=1.0)
        DemoView(console).show(DemoResult(run, run, recovered=found))
        assert text in console.export_text()


def test_a_held_server_has_its_l1_again_after_it_was_killed(temporary):
    with HeldServerProcess(["l1.capacity=4MiB"], f"ipc://{temporary}/s.sock", temporary) as server:
        server.await_ready()
        assert server.recovered().why_cold.startswith("nothing_kept")
        _, killed = server.kill_server()
        assert time.monotonic() > killed
        assert server.recovered().why_cold == ""
    assert [name for name in left_behind(temporary) if not name.endswith((".log", ".hold.lock"))] == []


def test_a_step_that_fails_is_marked(tmp_path):
    with (tmp_path / "out").open("w", encoding="utf-8") as out:
        view = DemoView(Console(file=out, width=100))
        with pytest.raises(ValueError), view.step("first"):
            raise ValueError
        with view.step("second") as step:
            step.say("on the way")
            step.done("arrived")
    first, second = (tmp_path / "out").read_text(encoding="utf-8").splitlines()
    assert "✗" in first
    assert "✓" in second
    assert "arrived" in second


def test_a_child_that_ends_is_told_with_the_end_of_its_log(tmp_path):
    with DemoChild("server", [sys.executable, "-c", "raise SystemExit('no room')"], tmp_path) as child:
        wait_until(lambda: "no room" in (tmp_path / "server.log").read_text())

        def ended():
            try:
                child.check_alive()
            except DemoFailed as error:
                return "no room" in str(error)
            return False

        wait_until(ended)


def test_a_signal_between_start_and_registration_is_held_back():
    reached = []

    def interrupted():
        with uninterrupted():
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGTERM)
            reached.append(True)

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert reached
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_the_shipped_text_is_whole():
    import kvf_demo as demo

    text = Path(demo.__file__).with_name("declaration.txt").read_text(encoding="utf-8")
    assert text.startswith("In Congress, July 4, 1776")
    assert text.rstrip().endswith("our Lives, our Fortunes and our sacred Honor.")
    assert 7900 < len(text) < 8400


def test_an_engine_whose_time_is_over_is_told_apart_from_one_that_failed(tmp_path: Path) -> None:
    sleeping = ["-n1", "-r1", "import time; time.sleep(600)"]
    with uninterrupted():
        engine = EngineProcess("engine A", "timeit", sleeping, tmp_path, timeout_s=0.2)
    with engine, pytest.raises(DemoFailed, match="engine-A was not done after 0 s, the demo's limit") as caught:
        list(engine.events())
    assert "--tokens" in caught.value.hint


@pytest.mark.transformers
def test_a_prompt_in_pieces_is_computed_as_in_one() -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from kvf_transformers.demo_engine import _prefill
    from kvf_transformers.demo_model import random_llama
    from kvf_transformers.forward import Forward, Restored

    _, model, _ = random_llama("tiny")
    events: list[tuple[str, int]] = []

    class Cold:
        def prefill(self, tokens: list[int], restored: Restored) -> tuple[object, object, Restored]:
            logits = Forward(model).compute(tokens[restored.hit_tokens :], restored.cache)
            return logits, restored.cache, restored

    def emit(event: str, tokens: int) -> None:
        events.append((event, tokens))

    from transformers import DynamicCache

    prompt = [number % 250 for number in range(100)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvf_transformers.demo_engine._PIECE_TOKENS", 40)
        cut, _ = _prefill(emit, Cold(), prompt, Restored(DynamicCache(), 0, 0, 0.0, 0.0))  # type: ignore[arg-type]
    whole = Forward(model).compute(prompt, DynamicCache())
    assert events == [("computed", 40), ("computed", 80), ("computed", 100)]
    assert torch.allclose(cut, whole, atol=1e-4)
