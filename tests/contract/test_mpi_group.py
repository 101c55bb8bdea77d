"""The process group over MPI does what torch's own groups do, whichever MPI it is."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from group_worker import FORMS
from launchers import assert_none_left, command, run

from hvd_ddp.backends import mpi
from hvd_ddp.errors import HvdDDPError
from hvd_ddp.job.launch import Launch

HERE = Path(__file__).parent


@pytest.fixture(scope="module", params=["mpirun", "mpiexec.mpich"])
def out(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run it once; it ends with an exception on rank 0, which must not wait for rank 1 in MPI's farewell."""
    out = tmp_path_factory.mktemp("group")
    env = {}
    if request.param == "mpiexec.mpich":  # as a site's MPICH calls itself, for Debian's
        (out / "libmpi.so.12").symlink_to(next(Path("/usr/lib").glob("*/libmpich.so.12")))
        env = {"LD_LIBRARY_PATH": str(out), "MPI4PY_MPIABI": "mpich"}
    result = run(command(request.param, 2, [str(HERE / "group_worker.py"), str(out)]), timeout=150, **env)
    assert result.code == 1, result.text[-4000:]
    assert "an end in the middle" in result.err
    assert_none_left(str(out))
    return out


def weights(out: Path, form: str, transport: str, rank: int) -> torch.Tensor:
    return torch.load(out / f"{form} {transport} {rank}.pt", weights_only=True)


@pytest.mark.parametrize("form", FORMS[:-1])
def test_the_bits_of_gloo(form: str, out: Path) -> None:
    for rank in range(2):
        assert torch.equal(weights(out, form, "mpi", rank), weights(out, form, "gloo", 0))


def test_a_hook_that_waits_within_its_callbacks(out: Path) -> None:
    first, second = (weights(out, "PowerSGD", "mpi", rank) for rank in range(2))
    plain = weights(out, "plain", "mpi", 0)
    assert torch.equal(first, second)
    assert 0 < (first - plain).norm() < 1e-3 * plain.norm()


def test_collectives(out: Path) -> None:
    for rank in range(2):
        seen = json.loads((out / f"rank{rank}.json").read_text())["collectives"]
        assert seen.pop("all_gather_object") == [{"of": 0}, {"of": 1}]
        assert seen.pop("broadcast_object_list") == [{"of": 1}]
        assert seen.pop("gather_object") == ([{"of": 0}, {"of": 1}] if rank == 0 else None)
        assert seen.pop("scatter_object_list") == [f"for {rank}"]
        assert seen.pop("broadcast") == [True, False]
        assert seen.pop("reduce") == (1.0 if rank == 1 else None)
        assert seen.pop("everyone") == 2.0
        assert seen.pop("alone") == 1.0
        wanted = {"SUM": 5.0, "AVG": 2.5, "MAX": 3.0, "MIN": 2.0, "PRODUCT": 6.0}
        assert len(seen) == 20
        for name, values in seen.items():
            assert values == [wanted[name.split()[0]]], name


def test_what_can_not_be_done_is_said_to_all_who_wait(out: Path) -> None:
    said = json.loads((out / "rank0.json").read_text())["refusals"]
    assert said["now"] == "MPIError: no SUM of `torch.bool`"
    assert "MPIError: no SUM of `torch.bool`" in said["later"]


def test_nobody_waits_for_ever(out: Path) -> None:
    error, seconds, peer = json.loads((out / "rank0.json").read_text())["nobody came"]
    assert error == "the other ranks did not come to a collective within 3 s"
    assert 3 <= seconds < 5
    assert peer


@pytest.mark.parametrize(
    ("world", "threads", "wanted"),
    [
        ((0, 1), 3, "MPI says rank `0` of `1`, but srun started this as rank `1` of `2`"),
        ((1, 2), 2, "`MPICH Version: 4.2` offers no calls from several threads"),
    ],
)
def test_an_mpi_that_can_not_be_used(
    world: tuple[int, int], threads: int, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = SimpleNamespace(
        COMM_WORLD=SimpleNamespace(rank=world[0], size=world[1]), Query_thread=lambda: threads, THREAD_MULTIPLE=3
    )
    monkeypatch.setattr(mpi, "start", lambda: fake)
    monkeypatch.setattr(mpi, "library", lambda: "MPICH Version: 4.2\nMPICH Release date: today")
    with pytest.raises(HvdDDPError, match="--transport gloo") as refusal:
        mpi.join(Launch("srun", rank=1, world_size=2))
    assert wanted in str(refusal.value)
