"""Sphinx's configuration, copied beside the sources that `python -m docs.site` writes."""

from flyspec.cli.main import app as _app  # noqa: F401  fails early if flyspec cannot be imported

project = "flyspec"
project_copyright = "the flyspec developers"
author = "the flyspec developers"
html_title = "flyspec"
html_theme = "furo"
html_static_path = ["site/static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_copy_source = False
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.viewcode", "sphinx_copybutton"]
exclude_patterns = ["site"]

# Anchors of headings are those of GitHub, where the documents can be read too.
myst_heading_anchors = 4
suppress_warnings = ["myst.header", "misc.highlighting_failure"]
smartquotes = False  # flags begin with two hyphens

# Docstrings are plain English with names in single backquotes.
default_role = "code"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autoclass_content = "class"
add_module_names = False
python_use_unqualified_type_names = True
copybutton_exclude = ".linenos, .gp, .go"
