"""What can be wrong with a plugin before anybody uses it: `kvframework plugins check`. The plugin's own code runs in
other processes only, each with a deadline."""

from kvframework.inspection.inspector import Report, inspect_plugin
from kvframework.inspection.problems import PROBLEMS, Problem

__all__ = ["PROBLEMS", "Problem", "Report", "inspect_plugin"]
