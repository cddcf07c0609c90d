"""All benchmarks, one after the other, each in a process of its own, then the README's tables:
`make bench`, about ten minutes on one thread of a quiet machine.

`make bench-peers` adds what others' packages cost on the same weights.
"""

import subprocess
import sys
import time
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
BENCHMARKS = ("masked", "methods", "lenses", "spread")
WRITERS = ("readme.py", "families.py")  # of what the README says of costs


def main() -> None:
    for name in BENCHMARKS:
        began = time.perf_counter()
        print(f"== {name}", flush=True)
        subprocess.run([sys.executable, str(FOLDER / f"{name}.py")], check=True)
        print(f"   {time.perf_counter() - began:.0f} s", flush=True)
    for name in WRITERS:
        subprocess.run([sys.executable, str(FOLDER.parent / "scripts" / name)], check=True)


if __name__ == "__main__":
    main()
