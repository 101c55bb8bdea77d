"""A Slurm cluster with hosts of its own on this machine; README.md says how. Tests take the fixture `cluster`."""
