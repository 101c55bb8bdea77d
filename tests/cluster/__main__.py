"""`python -m tests.cluster up --nodes 2`, `sh -- COMMAND`, `down`: the cluster by hand, from the repository root."""

import sys
from pathlib import Path

# One name for the package, the one that the tests use, however it was started.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cluster.by_hand import main

sys.exit(main())
