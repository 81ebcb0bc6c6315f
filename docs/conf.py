"""Sphinx configuration: Markdown pages and numpydoc docstrings, built by `make docs`."""

from importlib import metadata

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

# Operators of torch are documented where torch is not installed, too.
autodoc_mock_imports = ["torch"]
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # numpydoc sections carry the types
autosummary_generate = True
numpydoc_show_class_members = False
numpydoc_xref_param_type = False
myst_heading_anchors = 3

html_theme = "pydata_sphinx_theme"
html_title = f"flashwarp {release}"
html_theme_options = {"show_prev_next": False, "navigation_with_keys": False}
