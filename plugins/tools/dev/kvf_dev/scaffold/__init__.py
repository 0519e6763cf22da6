"""A new plugin's distribution, complete and working, from the templates in this package. Runs in the command's process.

`templates/shared` has the files of every kind; those of `PluginNames.templates` are added to them. Files end in `-tpl`,
so that no tool takes them for code of this package.
"""

from kvf_dev.scaffold.names import VARIANTS, FolderExists, NameRefused, PluginNames, ScaffoldError, choose_names
from kvf_dev.scaffold.rendering import kits_requirement, render, write_distribution

__all__ = [
    "VARIANTS",
    "FolderExists",
    "NameRefused",
    "PluginNames",
    "ScaffoldError",
    "choose_names",
    "kits_requirement",
    "render",
    "write_distribution",
]
