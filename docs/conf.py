"""How `make docs` builds the site. The repository is its source, so links lead as far here as on GitHub."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from fn.version import __version__

project = "fn"
author = "The fn authors"
copyright = author
release = __version__

extensions = ["sphinx.ext.autodoc", "myst_nb", "docstrings"]
root_doc = "docs/index"
include_patterns = [
    "docs/**.md",
    "notebooks/*.ipynb",
    "benchmarks/README.md",
    "tests/golden/**.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
]
exclude_patterns = [".*", "out"]

myst_heading_anchors = 4
nb_execution_mode = "off"
smartquotes = False
autodoc_inherit_docstrings = False
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
autodoc_default_options = {"members": True, "member-order": "bysource"}
python_maximum_signature_line_length = 110
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_title = f"fn {release}"
html_extra_path = ["redirect"]
html_static_path = ["static"]
html_css_files = ["wide.css"]
