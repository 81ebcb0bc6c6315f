"""Sphinx configuration: Markdown pages and numpydoc docstrings, built by `make docs`."""

import re
from importlib import metadata

from sphinx.ext.autodoc.mock import _MockModule, _MockObject

project = "flashwarp"
author = "the flashwarp authors"
copyright = "the flashwarp authors, Apache License 2.0"  # noqa: A001 (Sphinx's name)
release = metadata.version("flashwarp")

extensions = [
    "myst_parser",
    "numpydoc",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
]
exclude_patterns = ["_build"]
templates_path = ["_templates"]

# Stand-ins, so that pages are built where torch and PyG are not installed. Each name of one is the
# same object each time, because dtypes are keys of tables, and may be an alternative of a type.
autodoc_mock_imports = autosummary_mock_imports = ["torch", "torch_geometric"]
_make = _MockModule.__getattr__
_MockModule.__getattr__ = lambda module, name: vars(module).setdefault(name, _make(module, name))
_MockObject.__or__ = _MockObject.__ror__ = lambda one, _: one

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # numpydoc sections carry the types
autosummary_generate = False  # its tables show first sentences, and lead to docstrings below
numpydoc_show_class_members = False
numpydoc_xref_param_type = False
myst_heading_anchors = 4

html_theme = "pydata_sphinx_theme"
html_title = f"flashwarp {release}"
html_sidebars = {"**": ["pages.html"]}
html_theme_options = {
    "show_prev_next": False,
    "navigation_with_keys": False,
    # The sidebar has all pages.
    "navbar_center": [],
    "secondary_sidebar_items": ["page-toc"],
}


def add_summary(block):
    """Put a table of names and first sentences before the docstrings of a section."""
    names = re.findall(r"^\.\. auto(?:function|class):: (\S+)", block[1], re.MULTILINE)
    rows = "".join(f"   ~{name}\n" for name in names)
    table = f".. autosummary::\n   :nosignatures:\n\n{rows}\n" if len(names) > 1 else ""
    return f"```{{eval-rst}}\n{table}{block[1]}```"


def add_summaries(_, page, source):
    """Do so in all sections of the interface."""
    if page == "reference":
        source[0] = re.sub(r"```\{eval-rst\}\n(.*?)```", add_summary, source[0], flags=re.DOTALL)


def setup(app):
    """Sphinx calls this."""
    app.connect("source-read", add_summaries)
