"""The README's program is examples/quickstart.cpp, word for word. Usage: readme_test.py <root>"""

import re
import sys
from pathlib import Path

root = Path(sys.argv[1])
readme = root / "README.md"
if not readme.exists():
    sys.exit("there is no README.md")
program = (root / "examples" / "quickstart.cpp").read_text()
blocks = re.findall(r"^```(?:cpp|c\+\+)\n(.*?)^```", readme.read_text(), re.DOTALL | re.MULTILINE)
if program not in blocks:
    sys.exit("README.md has no ```cpp block that is equal to examples/quickstart.cpp")
