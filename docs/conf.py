"""How Sphinx builds these pages: `make docs`."""

import importlib.metadata

project = "sparsejax"
release = importlib.metadata.version("sparsejax")

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_design",
    "sphinxcontrib.mermaid",
]
exclude_patterns = ["_build", "jupyter_execute"]
highlight_language = "none"  # of blocks that do not say what they are
html_theme = "furo"
html_show_copyright = False
html_title = "sparsejax"
nb_execution_mode = "off"  # the tests run the notebooks; pages show what they printed
myst_enable_extensions = ["colon_fence"]
myst_fence_as_directive = ["mermaid"]  # GitHub draws it from the plain fence
myst_heading_anchors = 3

default_role = "code"  # docstrings write `code` with single backquotes
napoleon_numpy_docstring = False
napoleon_use_ivar = True  # a dataclass's attributes once, not twice
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True}


def setup(app) -> None:
    """Links to the benchmarks' page, as they are in the repository, stay inside."""

    def relink(app, page: str, source: list[str]) -> None:
        source[0] = source[0].replace("](../benchmarks/README.md", "](benchmarks.md")

    app.connect("source-read", relink)
