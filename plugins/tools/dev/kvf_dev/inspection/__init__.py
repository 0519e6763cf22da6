"""The checks of `kvframework plugins check`: faults of a plugin that show before its first use. The plugin's own code
runs in other processes only, each with a deadline."""

from kvf_dev.inspection.inspector import Report, inspect_plugin
from kvf_dev.inspection.problems import PROBLEMS, Problem

__all__ = ["PROBLEMS", "Problem", "Report", "inspect_plugin"]
