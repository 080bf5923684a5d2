"""The blocks of code of the project's pages.

A comment in front of a block says what it is, and a name joins the blocks of one example:

  <!-- script: NAME -->   a program that a test runs
  <!-- part: NAME -->     a part of one, which a test runs with what the part takes for granted
  <!-- command: NAME -->  commands that a test runs
  <!-- file: NAME -->     a file that those need
  <!-- output: NAME -->   what they print
"""

import dataclasses
import pathlib
import re
import textwrap

ROOT = pathlib.Path(__file__).resolve().parent.parent
FENCE = re.compile(r"^( *)(?:<!-- (\w+): ([\w.-]+) -->\n\s*)?```(\S*)\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)


@dataclasses.dataclass
class Block:
    where: str  # PAGE:LINE
    kind: str  # of the comment in front; "": there is none
    name: str
    language: str
    text: str


def blocks(page):
    """page: relative to the root of the repository."""
    text = (ROOT / page).read_text()
    return [Block(f"{page}:{text.count(chr(10), 0, found.start(4)) + 1}", found[2] or "", found[3] or "", found[4],
                  textwrap.dedent(found[5])) for found in FENCE.finditer(text)]


def block(page, kind, name):
    (found,) = [one for one in blocks(page) if (one.kind, one.name) == (kind, name)]
    return found.text


def commands(text):
    """The words of each command of a block in the language of the shell, without comments and variables."""
    for line in text.replace("\\\n", " ").splitlines():
        words = re.sub(r"(^|\s)#.*", "", line).replace("&&", "").replace(";", " ").split()
        while words and re.fullmatch(r"\w+=\S*", words[0]):
            words.pop(0)
        if words:
            yield words
