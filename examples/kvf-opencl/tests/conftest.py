"""Skips all tests where no OpenCL platform is."""

import pytest

from kvf_opencl import probe


@pytest.fixture(scope="session", autouse=True)
def opencl() -> None:
    if reason := probe():
        pytest.skip(reason)
