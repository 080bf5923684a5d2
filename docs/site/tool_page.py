#!/usr/bin/env python3
"""Prints docs/tool.md, the help texts of the tool: docs/site/tool_page.py build/release/skim > docs/tool.md"""

import re
import subprocess
import sys

COMMANDS = ["train", "inspect", "bench select", "bench wire", "bench network", "bench scaling", "plan", "simulate",
            "simulate --train", "report", "checkpoint verify", "version"]
INTRO = """# The tool: skim

This page has the help texts of all commands, as `skim COMMAND --help` prints them. A config file
(`--config`) takes the same long names. [JSON that Skim writes](metrics.md) has them with
underscores. On Debian 12 and 13 these commands install what the tool needs, and build it as
`build/release/skim`:

```sh
scripts/setup
cmake --preset release && cmake --build --preset release --target skim_tool
```
"""


def help_text(tool, command):
    done = subprocess.run([tool, *command.split(), "--help"], capture_output=True, text=True, timeout=60, check=True)
    text = "\n".join(line.rstrip() for line in done.stdout.strip().splitlines())
    # Machines and folders differ.
    text = re.sub(r"CPU target: [\w,\s]+\[the\s+best\]", "CPU target [the best]", text)
    return re.sub(r"\[/\S*(bench/index_sets)\]", r"[\1]", text)


def page(tool):
    parts = [INTRO]
    for command in ["", *COMMANDS]:
        title = f"## skim {command}\n\n" if command else ""
        parts.append(f"{title}```text\n{help_text(tool, command)}\n```\n")
    return "\n".join(parts)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    sys.stdout.write(page(sys.argv[1]))
