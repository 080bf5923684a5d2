"""Settings of the documentation site. scripts/site builds it."""

import pathlib
import re
import sys
import types

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT / "tests")]

from docstrings import restructured  # noqa: E402

# The frameworks of skim.integrations may not be installed. autodoc only needs the names of the base classes.
# (autodoc_mock_imports would replace the signatures of the derived classes.)
for module, base in ("transformers", "TrainerCallback"), ("lightning.pytorch.callbacks", "Callback"):
    sys.modules[module] = types.SimpleNamespace(**{base: type(base, (), {})})

project = "Skim"
version = release = re.search(r"project\(skim VERSION ([\d.]+)", (ROOT / "CMakeLists.txt").read_text())[1]
copyright = "the authors of Skim. License: Apache-2.0"

extensions = ["myst_parser", "sphinx.ext.autodoc", "breathe"]
root_doc = "index"
include_patterns = ["*.md", "docs/**.md", "studies/README.md", "headers/*.rst"]
myst_heading_anchors, myst_heading_slug_func = 6, "links_test.anchor"  # as on GitHub

breathe_projects = {"skim": str(ROOT / "build/site-headers/xml")}
breathe_default_project = "skim"
suppress_warnings = ["duplicate_declaration.cpp"]  # of the namespace, once for each header

autodoc_member_order = "bysource"
autoclass_content = "both"
python_maximum_signature_line_length = 80
python_use_unqualified_type_names = True
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_title = f"Skim {version}"
html_copy_source = html_use_index = False


def write_header_pages(app, config):
    folder = pathlib.Path(app.srcdir, "headers")
    folder.mkdir(exist_ok=True)
    for header in (ROOT / "include/skim").glob("*.h*"):
        page = folder / f"{header.stem}.rst"
        if not page.exists():  # a page that is written again is read again
            page.write_text(f"{header.name}\n{'=' * len(header.name)}\n\n.. doxygenfile:: {header.name}\n")


def link_header_pages(app, docname, source):
    source[0] = re.sub(r"\]\(\.\./include/skim/(\w+)\.h(?:pp)?\)", r"](/headers/\1.rst)", source[0])


def restructure(app, what, name, obj, options, lines):
    lines[:] = restructured("\n".join(lines)).splitlines()


def setup(app):
    app.connect("config-inited", write_header_pages)
    app.connect("source-read", link_header_pages)
    app.connect("autodoc-process-docstring", restructure)
