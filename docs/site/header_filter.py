"""Makes the comments of a header ones that doxygen reads. Doxyfile calls it: header_filter.py FILE

Skim's comments are plain text. Those that stand in front of a declaration or behind it become its description, and
lines that are indented stay as they are.
"""

import re
import sys

COMMENT = re.compile(r"(\s*)// ?(.*)")
BEHIND = re.compile(r"(.*\S)\s+// (?!NOLINT|namespace)(.*)")
LABEL = re.compile(r"[A-Z]\w+(?:, \w+)*: +")  # "Throws: ..." begins a paragraph, whose lines may hang under its text
RULE = re.compile(r"-{4} .*")  # the title of a part of the header
DESIGNATED = re.compile(r"(?: = |\b)(\{\.\w[^}]*\});$")  # an initializer that Sphinx cannot read
# Of an enum: every header has them, and they say nothing that names.hpp does not.
SPECIALISATION = re.compile(r"(?:// .*\n)*template <>\n[^;]*\bnames_of<\w+>\(\) noexcept;\n")


def described(text):
    """Lines of a comment, as one that doxygen reads."""
    found, fenced, hang = [], False, ""
    for line in text:
        label = LABEL.match(line)
        if label:
            hang = " " * len(label[0])
        elif hang and not line.startswith(hang):
            hang = ""
            found.append("")
        is_block = line.startswith("  ") and not hang
        if is_block != fenced and line:
            found += ["", "~~~{.txt}"] if is_block else ["~~~"]
            fenced = is_block
        if label:
            line = f"\n<b>{label[0].strip()}</b> {line[len(label[0]):]}"
        found.append(line.removeprefix(hang))
    return [*found, "~~~"] if fenced else found


def with_line_comments(header):
    """A header in C, with // for each line of its /* comments */."""

    def lines(comment):
        return "\n".join(f"{comment[1]}// {line}".rstrip() for line in re.split(r"\n\s*\* ?", comment[2].strip()))

    header = re.sub(r"(?ms)^([ \t]*)/\*(.*?)\*/", lines, header)
    return re.sub(r"/\* (.*) \*/", r"// \1", header)


def filtered(header):
    lines, kept, comment = SPECIALISATION.sub("", header).splitlines(), [], ["@file"]
    column = None  # of the comment behind the last declaration, which may go on in the next line
    for line in lines:
        before, behind = COMMENT.fullmatch(line), BEHIND.fullmatch(line)
        if before and column is not None and len(before[1]) >= column:
            kept.append(f"///< {before[2]}")
            continue
        column = None
        if before:
            comment += [] if RULE.fullmatch(before[2]) else [before[2]]
        elif not line and comment:
            comment.append("")
        else:
            if any(comment):
                kept += ["/**", *described(comment), "*/"]
            comment = []
            said = ""
            if behind:
                column = line.index(f"// {behind[2]}")
                line, said = behind.groups()
            initializer = DESIGNATED.search(line)
            if initializer:
                line, said = line[: initializer.start()] + ";", f"`{initializer[1]}` {said}".rstrip()
            kept.append(f"{line}  ///< {said}" if said else line)
    return "\n".join(kept) + "\n"


if __name__ == "__main__":
    with open(sys.argv[1]) as file:
        header = file.read()
        sys.stdout.write(filtered(with_line_comments(header) if sys.argv[1].endswith(".h") else header))
