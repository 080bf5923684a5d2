"""The C functions that a library exports are those that skim/c_api.h declares.

Usage: symbols_test.py <nm> <library> <header>
"""

import re
import subprocess
import sys
from pathlib import Path

nm, library, header = sys.argv[1:]
of = ["-D"] if ".so" in library else ["-g"]
listed = subprocess.run([nm, *of, "--defined-only", library], capture_output=True, text=True, check=True).stdout
exported = set(re.findall(r" T (skim_\w+)$", listed, re.MULTILINE))
declared = set(re.findall(r"\b(skim_\w+)\(", re.sub(r"//.*|/\*.*?\*/", "", Path(header).read_text(), flags=re.DOTALL)))
if not declared or exported != declared:
    sys.exit(f"{library}: missing: {sorted(declared - exported)}; not declared: {sorted(exported - declared)}")
