#!/usr/bin/env python3
"""Enforces the layers of the library (docs/architecture.md): a module includes only what stands below it.

Prints every include that goes sideways or up; exits with 1 if there is one. Usage: check_includes.py [root]
"""

import re
import sys
from pathlib import Path

LAYERS = [
    {"types", "error", "names", "version"},
    {"select", "feedback", "codec", "analysis", "communicator", "mpi", "quality", "report"},
    {"cost"},
    {"exchange"},
    {"schedule", "chooser", "local_half"},
    {"reducer"},
    {"local_steps"},
    {"fields"},
    {"c_api"},
    {"train", "tools", "bench", "python"},
]
LEVEL = {module: level for level, modules in enumerate(LAYERS) for module in modules}
# One module in two headers: the communicator, and the one of a caller's MPI_Comm.
SAME = {"mpi": "communicator"}
FREE = {"assert", "half", "normal", "numbers", "random", "state"}  # internal headers that any module may use


def module_of(path: str) -> str:
    """'skim/types.hpp', 'codec/codes.hpp', 'src/feedback.cpp', 'train/data.cpp' -> the module's name."""
    parts = [p for p in Path(path).parts if p not in ("include", "src", "skim")]
    name = parts[0].split(".")[0]
    return SAME.get(name, name)


def main() -> int:
    root = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
    files = [p for d in ("include", "src", "train", "tools", "python") for p in sorted([*(root / d).rglob("*.?pp"), *(root / d).rglob("*.h")])]
    if len(files) < 20:
        sys.exit(f"check_includes: found only {len(files)} sources below {root.resolve()}")
    bad = []
    for path in files:
        own = module_of(str(path.relative_to(root)))
        for number, line in enumerate(path.read_text().splitlines(), 1):
            found = re.match(r'\s*#\s*include\s+"([^"]+)"', line)
            if not found:
                continue
            other = module_of(found[1])
            where = f"{path.relative_to(root)}:{number}: {found[1]}"
            if own == other or other in FREE:
                continue
            if own in FREE:
                allowed = LEVEL.get(other) == 0
            elif own not in LEVEL or other not in LEVEL:
                allowed = False
            else:  # the words at the bottom, and the programs at the top, may include one another
                both_at_an_end = LEVEL[own] == LEVEL[other] and LEVEL[own] in (0, len(LAYERS) - 1)
                allowed = LEVEL[other] < LEVEL[own] or both_at_an_end
            if not allowed:
                bad.append(f"{where}: '{own}' may not include '{other}'")
    print("\n".join(bad) if bad else f"{len(files)} files: the layers hold")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
