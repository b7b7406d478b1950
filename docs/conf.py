"""Settings of the documentation's site: ``make docs`` builds it into ``build/docs``."""

from __future__ import annotations

import tsfunc

project = "tsfunc"
copyright = "the tsfunc developers"
release = version = tsfunc.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]

autodoc_typehints = "none"  # the docstrings describe the types in words
autodoc_member_order = "bysource"
napoleon_numpy_docstring = False
add_module_names = False

html_theme = "furo"
html_title = f"tsfunc {release}"
html_copy_source = False
html_show_sphinx = False
pygments_style = "friendly"
