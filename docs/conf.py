"""Sphinx configuration."""

from ottava import __version__ as release  # noqa: F401  (read by Sphinx)

project = "Ottava"
author = "The Ottava developers"
copyright = "The Ottava developers"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = "Ottava"
html_static_path = ["_static"]
html_css_files = ["wrap.css"]
exclude_patterns = ["_build"]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
autodoc_typehints = "none"
autodoc_member_order = "bysource"
suppress_warnings = ["myst.xref_missing"]
# One argument a line where a signature is wider than the column.
maximum_signature_line_length = 88
