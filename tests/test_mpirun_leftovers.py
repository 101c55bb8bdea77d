"""What the tests themselves stand on."""

import os
import subprocess
from pathlib import Path

from launchers import clear_what_killed_mpiruns_left


def test_what_killed_mpiruns_left(tmp_path: Path) -> None:
    """Of one that runs, or of another kind, nothing is taken away."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    names = {f"ompi.{ended.pid}": False, f"ompi.{os.getpid()}": True, "ompi.mine": True, f"other.{ended.pid}": True}
    for name in names:
        (tmp_path / name / "0").mkdir(parents=True)
        (tmp_path / name / "pmix.host.tool").touch()
    clear_what_killed_mpiruns_left(tmp_path)
    assert {name: (tmp_path / name / "pmix.host.tool").exists() for name in names} == names
