"""`kvframework.testing` still names the kits, with a warning, until release 0.4."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    from kvframework.testing import TierConformance
    from kvframework.testing.faults import FaultProxy
    import kvframework.testing.accelerator
import kvf_dev.testing, kvf_dev.testing.accelerator, kvf_dev.testing.faults
assert TierConformance is kvf_dev.testing.TierConformance
assert FaultProxy is kvf_dev.testing.faults.FaultProxy
assert kvframework.testing.accelerator is kvf_dev.testing.accelerator
print(*(f"{each.category.__name__}: {each.message}" for each in caught if "kvf_dev" in str(each.message)), sep="\\n")
"""


def test_it_names_the_same_kits_and_warns_once() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == (
        "DeprecationWarning: kvframework.testing has moved to kvf_dev.testing, of the distribution kvframework-dev\n"
    )
