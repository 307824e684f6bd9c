"""How Sphinx builds these pages: `make docs`."""

import importlib.metadata
import re

project = "sparsejax"
release = importlib.metadata.version("sparsejax")

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
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
autosummary_generate = False  # tables only: the pages of the API have the names below


def described(page: str) -> list[str]:
    """The names that a page of the API describes, as they stand after `sj.`."""
    module, names = "sparsejax", []
    for line in page.splitlines():
        match re.findall(r"^\.\. (currentmodule|auto[a-z]+):: (\S+)$", line):
            case [("currentmodule", name)]:
                module = name
            case [("autoclass" | "autofunction" | "autoexception", name)]:
                whole = name if name.startswith("sparsejax.") else f"{module}.{name}"
                names.append(whole.removeprefix("sparsejax."))
    return names


def setup(app) -> None:
    """Links to the benchmarks stay inside, and pages of the API begin with a table."""

    def relink(app, page: str, source: list[str]) -> None:
        source[0] = source[0].replace("](../benchmarks/README.md", "](benchmarks.md")

    def summarize(app, page: str, source: list[str]) -> None:
        names = described(source[0]) if page.startswith("api/") else []
        if names:
            title, _, rest = source[0].partition("\n")
            rows = "".join(f"   {name}\n" for name in names)
            table = f".. currentmodule:: sparsejax\n.. autosummary::\n   :nosignatures:\n\n{rows}"
            source[0] = f"{title}\n\n```{{eval-rst}}\n{table}```\n{rest}"

    app.connect("source-read", relink)
    app.connect("source-read", summarize)
