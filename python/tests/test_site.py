"""The documentation site builds without a warning, has every public name, and needs no network."""

import ast
import fcntl
import html.parser
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest
import urllib.parse
import zlib

import skim

ROOT = pathlib.Path(__file__).resolve().parents[2]
SITE, SPHINX = ROOT / "build/site", ROOT / "build/site-env/bin/sphinx-build"

sys.path.insert(0, str(ROOT / "docs/site"))

from docstrings import restructured  # noqa: E402
from header_filter import filtered  # noqa: E402


class Document(html.parser.HTMLParser):
    """What a page of the site links to, loads, and can be linked to."""

    def __init__(self, path):
        super().__init__()
        self.links, self.loaded, self.ids = [], [], {"top"}
        self.feed(path.read_text())

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.ids.add(found.get("id"))
        if tag == "a" and found.get("href"):
            self.links.append(found["href"])
        if tag in ("img", "script", "iframe") and found.get("src"):
            self.loaded.append(found["src"])
        if tag == "link" and found.get("rel") in ("stylesheet", "icon") or tag == "object":
            self.loaded.append(found.get("href") or found["data"])


def inventory():
    """Names of the API on the site, as other sites find them."""
    lines = (SITE / "objects.inv").read_bytes().split(b"\n", 4)[4]
    return {line.split(" ")[0] for line in zlib.decompress(lines).decode().splitlines()}


@unittest.skipUnless(SPHINX.exists(), "Sphinx is not installed: run scripts/site")
class Site(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        """Builds the site, once for all processes that share these tests: building it removes it first."""
        run, built = os.environ.get("PYTEST_XDIST_TESTRUNUID", ""), ROOT / "build/site-of-tests"
        built.parent.mkdir(exist_ok=True)
        with open(f"{built}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if run and built.exists() and built.read_text() == run:
                cls.done = subprocess.CompletedProcess([], 0, "", "")
                return
            cls.done = subprocess.run([ROOT / "scripts/site"], capture_output=True, text=True, timeout=600)
            if cls.done.returncode == 0:
                built.write_text(run)

    def setUp(self):
        self.assertEqual(self.done.returncode, 0, self.done.stdout + self.done.stderr)

    def test_every_page_of_docs_is_there(self):
        pages = [*ROOT.glob("*.md"), *(page for page in ROOT.glob("docs/**/*.md") if page.name != "index.md")]
        self.assertGreater(len(pages), 30)
        for page in pages:
            self.assertTrue((SITE / page.relative_to(ROOT)).with_suffix(".html").exists(), page.name)

    def test_every_public_name_is_there(self):
        there = inventory()
        modules = {"__version__", "analysis", "protocols"}
        self.assertEqual({f"skim.{name}" for name in set(skim.__all__) - modules} - there, set())
        self.assertEqual({name for module in (skim.analysis, skim.protocols) for name in (
            f"{module.__name__}.{one}" for one, what in vars(module).items()
            if not one.startswith("_") and getattr(what, "__module__", "") == module.__name__)} - there, set())
        # Their frameworks may not be installed here, so they are not imported.
        integrations = {f"skim.integrations.{file.stem}.{one.name}"
                        for file in (ROOT / "python/skim/integrations").glob("[!_]*.py")
                        for one in ast.parse(file.read_text()).body
                        if isinstance(one, ast.ClassDef | ast.FunctionDef) and not one.name.startswith("_")}
        self.assertGreater(len(integrations), 2)
        self.assertEqual(integrations - there, set())
        headers = [header.read_text() for header in (ROOT / "include/skim").glob("*.hpp")]
        declared = re.compile(r"^(?:class|struct|enum class) (\w+)\b[^;]*?\{", re.MULTILINE)
        types = {name for text in headers for name in declared.findall(text)}
        self.assertGreater(len(types), 60)
        self.assertEqual({name for name in types if not {f"skim::{name}", f"skim::analysis::{name}"} & there}, set())

    def test_every_member_that_a_page_lists_is_there(self):
        there = inventory()
        listed = re.compile(r"^\.\. autoclass:: (\S+)\n   :members: (.+(?:\n {6}.+)*)$", re.MULTILINE)
        members = {f"{name}.{member.strip()}" for page in (ROOT / "docs/site").glob("*.md")
                   for name, names in listed.findall(page.read_text()) for member in names.split(",")}
        self.assertGreater(len(members), 30)
        self.assertEqual(members - there, set())
        self.assertNotIn("skim.fsdp.FsdpCompression.reduce_bucket", there)

    def test_links_and_pictures_are_there(self):
        pages = {page: Document(page) for page in SITE.rglob("*.html")}
        wrong = []
        for page, document in pages.items():
            for link in [*document.links, *document.loaded]:
                if link.startswith(("http", "mailto:", "data:")):
                    continue
                path, _, heading = urllib.parse.unquote(link).partition("#")
                target = (page.parent / path.partition("?")[0]).resolve() if path else page
                if not target.exists() or heading and target in pages and heading not in pages[target].ids:
                    wrong.append(f"{page.relative_to(SITE)}: {link}")
        self.assertEqual(wrong, [])

    def test_nothing_is_loaded_from_the_network(self):
        for page in SITE.rglob("*.html"):
            self.assertEqual([one for one in Document(page).loaded if re.match(r"\w+:|//", one)], [], page.name)
        self.assertTrue((SITE / "searchindex.js").exists())

    def test_what_fails_the_build(self):
        with tempfile.TemporaryDirectory() as folder:
            source = pathlib.Path(folder)
            (source / "docs").mkdir()
            (source / "index.md").write_text("# I\n\n```{toctree}\n:glob:\nheaders/*\ndocs/a\n```\n")
            (source / "docs/a.md").write_text("# A\n\n[b](none.md) [c](#none) [d](b.md#none)\n")
            (source / "docs/b.md").write_text("# B\n")
            done = subprocess.run([SPHINX, "-q", "-W", "--keep-going", "-b", "dummy", "-c", ROOT / "docs/site", source,
                                   source / "out"], capture_output=True, text=True, timeout=300)
        self.assertNotEqual(done.returncode, 0)
        for words in ("docs/a.md:3: WARNING: 'myst' cross-reference target not found: 'none.md'",
                      "'myst' cross-reference target not found: 'none'", "local id not found in doc 'docs/b': 'none'",
                      "docs/b.md: WARNING: document isn't included in any toctree"):
            self.assertIn(words, done.stderr)

    def test_wrong_usage(self):
        done = subprocess.run([ROOT / "scripts/site", "--none"], capture_output=True, text=True, timeout=60)
        self.assertEqual((done.returncode, done.stderr),
                         (2, "scripts/site: unknown argument '--none'; it takes none, or --set-up\n"))


class Contracts(unittest.TestCase):
    """How comments and docstrings become pages."""

    def test_docstrings(self):
        self.assertEqual(restructured(
            "Sums a_b.\nTwice.\n\ndensity: k/n, in\n    (0, 1].\n"
            "options: of `x`:\n    timeout: in seconds.\n\n    y = 1\n"), (
            "Sums a\\_b. Twice.\n\n``density``\n   k/n, in (0, 1].\n\n``options``\n   of ``x``:\n\n"
            "   ``timeout``\n      in seconds.\n\n.. code-block:: python\n\n   y = 1\n"))

    def test_headers(self):
        self.assertEqual(filtered(
            "// A header.\n#pragma once\nstruct S {  // NOLINT\n  int a = 1;  // one of\n              // two\n"
            "  Range r{.low = 0.0};\n};\n// Names.\ntemplate <>\nSpan names_of<S>() noexcept;\n"
            "// Does it.\n//   a  table\n// Throws: E: if\n//         it must.\nvoid f();\n"), (
            "/**\n@file\nA header.\n*/\n#pragma once\nstruct S {  // NOLINT\n  int a = 1;  ///< one of\n///< two\n"
            "  Range r;  ///< `{.low = 0.0}`\n};\n"
            "/**\nDoes it.\n\n~~~{.txt}\n  a  table\n~~~\n\n<b>Throws:</b> E: if\nit must.\n*/\nvoid f();\n"))


if __name__ == "__main__":
    unittest.main()
