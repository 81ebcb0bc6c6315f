"""Sphinx configuration: Markdown pages and numpydoc docstrings, built by `make docs`."""

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
