"""A new plugin's distribution, complete and working, from the templates in this package. Runs in the command's process.

`templates/shared` has the files of every kind; those of `PluginNames.templates` are added to them. Files end in `-tpl`,
so that no tool takes them for code of this package.
"""

from kvframework.scaffold.errors import FolderExists, NameRefused, ScaffoldError
from kvframework.scaffold.names import VARIANTS, PluginNames, choose_names
from kvframework.scaffold.rendering import render
from kvframework.scaffold.writing import write_distribution

__all__ = [
    "VARIANTS",
    "FolderExists",
    "NameRefused",
    "PluginNames",
    "ScaffoldError",
    "choose_names",
    "render",
    "write_distribution",
]
