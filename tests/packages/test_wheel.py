"""What is under test: in tox the installed wheel, never the checkout."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import kvf_demo
import kvf_redis
import kvframework

wheel = pytest.mark.skipif("KVFRAMEWORK_TEST_WHEEL" not in os.environ, reason="only tox tests the wheel")


@wheel
def test_this_process_tests_the_wheel() -> None:
    for package in (kvframework, kvf_redis):
        assert package.__file__ is not None
        assert "site-packages" in package.__file__


@wheel
def test_child_processes_test_the_wheel() -> None:
    shown = subprocess.run(
        [sys.executable, "-c", "import kvframework; print(kvframework.__file__)"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "site-packages" in shown.stdout


@wheel
def test_the_wheel_has_no_benchmarks() -> None:
    files = metadata.files("kvframework") or []
    assert any(file.name == "commands.py" for file in files)
    assert not [file for file in files if "bench" in str(file)]


def test_what_is_no_module_is_packaged_too() -> None:
    assert (Path(kvframework.__file__).parent / "py.typed").exists()
    assert Path(kvf_demo.__file__).with_name("declaration.txt").stat().st_size > 7000
