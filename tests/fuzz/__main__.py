"""`python -m tests.fuzz --minutes 60 [SURFACE ...]`, from the root of the repository."""

import argparse
import sys
from pathlib import Path

# One name for the package, the one that the tests use, however it was started.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fuzz.long import fuzz_for

parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
parser.add_argument("--minutes", type=float, default=60.0)
parser.add_argument("surfaces", nargs="*", help="modules, such as test_messages; none: all")
options = parser.parse_args()
sys.exit(1 if fuzz_for(options.minutes, options.surfaces) else 0)
