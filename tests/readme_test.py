"""README.md is short, and the programs in docs/library.md are files that are built and run.

Usage: readme_test.py <root>
"""

import re
import sys
from pathlib import Path

LINES, COLUMNS = 120, 100
PROGRAMS = ["examples/quickstart.cpp", "tests/consumer/own_exchange.cpp"]  # each is run by a test

root = Path(sys.argv[1])
wrong = []

lines = (root / "README.md").read_text().splitlines()
if len(lines) > LINES:
    wrong.append(f"README.md has {len(lines)} lines; at most {LINES} are allowed")
pages = ["README.md", "CONTRIBUTING.md", "docs/README.md", "docs/library.md"]
for page in pages:
    code = False
    for number, line in enumerate((root / page).read_text().splitlines(), 1):
        if line.startswith("```"):
            code = not code
        shown = re.sub(r"https?://\S+|\]\(\S+\)", "", line)  # an address may be as long as it is
        if not code and not line.startswith("|") and len(shown) > COLUMNS:
            wrong.append(f"{page}:{number}: {len(shown)} columns; at most {COLUMNS} are allowed")

text = (root / "docs/library.md").read_text()
blocks = re.findall(r"^```cpp\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
for program in PROGRAMS:
    if (root / program).read_text() not in blocks:
        wrong.append(f"docs/library.md has no ```cpp block that is equal to {program}")

headers = {header.name for header in (root / "include/skim").iterdir()}
named = set(re.findall(r"\.\./include/skim/(\w+\.h(?:pp)?)", text))
for header in sorted(headers - named):
    wrong.append(f"docs/library.md has no line about {header}")

if wrong:
    sys.exit("\n".join(wrong))
