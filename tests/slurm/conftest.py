"""The cluster that the tests of one file share: every job leaves it as it was."""

from collections.abc import Iterator

import pytest
from cluster.slurm import Cluster
from two_nodes import cluster_for


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster_for(tmp_path_factory) as cluster:
        yield cluster
