"""Docstrings as reStructuredText.

They are plain text, as help() shows it: paragraphs; lines that begin with a label ("Raises ...: ...") or with the names
of arguments ("density: ..."), both of which may go on in indented lines; and other indented blocks, which stay as they
are.
"""

import ast
import re
import textwrap

ENTRY = re.compile(r"(\w+(?:, \w+)*): (.*)")


def restructured(text):
    lines, found = text.splitlines(), []
    while lines:
        line = lines.pop(0)
        entry = ENTRY.fullmatch(line)
        if line.startswith(" "):
            found.append(_block([line, *_taken(lines, lambda one: one.startswith(" ") or not one)]))
        elif entry:
            found.append(_entry(entry[1], entry[2], _taken(lines, lambda one: one.startswith(" "))))
        elif line:
            more = _taken(lines, lambda one: one and not one.startswith(" ") and not ENTRY.fullmatch(one))
            found.append(_paragraph([line, *more]))
    return "\n\n".join(found) + "\n"


def _taken(lines, belongs):
    """Takes from the front of `lines` those that belong to the line before them."""
    count = next((i for i, line in enumerate(lines) if not belongs(line)), len(lines))
    taken = lines[:count]
    del lines[:count]
    return taken


def _paragraph(lines):
    """`code` is code; all else is plain."""
    parts = re.split(r"`([^`]+)`", " ".join(line.strip() for line in lines))
    return "".join(f"``{part}``" if i % 2 else re.sub(r"([\\*`|_])", r"\\\1", part) for i, part in enumerate(parts))


def _entry(names, text, indented):
    """An argument and what it means. Among the indented lines may be entries: the arguments of one's own."""
    indented = textwrap.dedent("\n".join(indented)).splitlines()
    own = _taken(indented, lambda line: not ENTRY.fullmatch(line))
    body = _paragraph([text, *own]) + "\n\n" + restructured("\n".join(indented))
    return f"``{names}``\n" + textwrap.indent(body.rstrip(), "   ")


def _block(lines):
    text = textwrap.dedent("\n".join(lines)).rstrip()
    try:
        ast.parse(text)
        language = "python"
    except SyntaxError:
        language = "text"
    return f".. code-block:: {language}\n\n" + textwrap.indent(text, "   ")
