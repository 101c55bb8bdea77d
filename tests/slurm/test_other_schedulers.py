"""What can be tested of the templates for PBS, LSF and Apptainer without them: the scripts themselves, with real ranks.

Stand-ins: qstat, qsub and bjobs, which answer as documented, and an apptainer that runs the command in no image.
"""

import datetime
import json
import re
from pathlib import Path

import pytest
import torch
from cluster.jobs import Job
from cluster.slurm import Cluster
from launchers import ROOT, Result, environment, run, train

STEPS = ["--max-steps", "12", "--log-every", "4"]


def stand_in(folder: Path, name: str, script: str) -> str:
    """Make a program; returns the PATH that finds it first."""
    (folder / "bin").mkdir(exist_ok=True)
    program = folder / "bin" / name
    program.write_text(f"#!/bin/bash\n{script}\n")
    program.chmod(0o755)
    return str(folder / "bin")


def start(template: str, folder: Path, **env: str) -> Result:
    path = f"{folder / 'bin'}:{environment()['PATH']}"
    options = " ".join([*STEPS, "--threads", "1"])
    env = {"OPTIONS": options, "PATH": path, "OMPI_MCA_mpi_yield_when_idle": "1"} | env
    env["PYTHONPATH"] = f"{ROOT}:{ROOT / 'tests'}"
    return run(["bash", str(ROOT / "slurm" / template)], cwd=folder, timeout=120, **env)


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    folder = tmp_path_factory.mktemp("wanted")
    result = train("mpirun", 2, *STEPS, "--run-dir", "run", cwd=folder)
    assert result.code == 0, result.text[-3000:]
    return weights(folder / "run")


def weights(run_dir: Path) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = torch.load(run_dir / "checkpoints/step_00000012.pt", weights_only=True)["model"]
    return state


def assert_finished(run_dir: Path, wanted: dict[str, torch.Tensor], *, restart: int) -> None:
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["status"], summary["restart"], summary["world_size"]) == ("finished", restart, 2)
    mine = weights(run_dir)
    assert all(torch.equal(mine[name], tensor) for name, tensor in wanted.items())


class TestPBS:
    JOB = "7.server"

    def env(self, folder: Path, job: str, *, walltime: str) -> dict[str, str]:
        """A job that has just begun, on two processors of this host."""
        (folder / "nodes").write_text("localhost\nlocalhost\n")
        began = datetime.datetime.now().strftime("%a %b %d %H:%M:%S %Y")
        said = (
            f"Job Id: {job}\n    Job_Name = train\n    job_state = R\n    Resource_List.ncpus = 4\n"
            f"    Resource_List.select = 2:ncpus=2:mpi\n\tprocs=1\n"
            f"    Resource_List.walltime = {walltime}\n    stime = {began}\n"
        )
        (folder / "said").write_text(said)
        stand_in(folder, "qstat", f'[[ "$*" == "-f {job}" ]] && cat {folder}/said')
        stand_in(folder, "qsub", f'printf "%s\\n" "$@" >{folder}/asked; env >{folder}/env')
        return {"PBS_JOBID": job, "PBS_O_WORKDIR": str(folder), "PBS_NODEFILE": str(folder / "nodes"), "NCPUS": "2"}

    def test_stops_before_the_walltime_and_submits_the_job_that_goes_on(self, tmp_path: Path, wanted: dict) -> None:
        result = start("train.pbs", tmp_path, **self.env(tmp_path, self.JOB, walltime="00:03:00"))
        assert result.code == 75, result.text[-3000:]
        assert "the allocation ends at" in result.out
        asked = (tmp_path / "asked").read_text().splitlines()
        assert "depend=afterany:7.server" in asked
        assert "select=2:ncpus=2:mpiprocs=1" in asked
        assert "walltime=00:03:00" in asked
        names = asked[asked.index("-v") + 1].split(",")
        given = dict(line.split("=", 1) for line in (tmp_path / "env").read_text().splitlines() if "=" in line)
        again = {name: given[name] for name in names}
        assert again["RUN_DIR"] == "runs/job-7.server"
        result = start("train.pbs", tmp_path, **self.env(tmp_path, "8.server", walltime="01:00:00"), **again)
        assert result.code == 0, result.text[-3000:]
        assert_finished(tmp_path / "runs/job-7.server", wanted, restart=1)

    def test_not_for_ever(self, tmp_path: Path) -> None:
        env = self.env(tmp_path, self.JOB, walltime="00:03:00")
        assert start("train.pbs", tmp_path, REQUEUES="20", **env).code == 75
        assert not (tmp_path / "asked").exists()

    def test_a_failure_or_a_bad_option_submits_nothing(self, tmp_path: Path) -> None:
        env = self.env(tmp_path, self.JOB, walltime="01:00:00")
        result = start("train.pbs", tmp_path, **env | {"OPTIONS": "--lr 0"})
        assert result.code == 2, result.text[-3000:]
        assert result.err.count("--lr is `0.0`") == 1
        result = start(
            "train.pbs", tmp_path, **env | {"OPTIONS": "--model factories:Faulty --max-steps 9", "FAULT": "throw@1"}
        )
        assert result.code == 1, result.text[-3000:]
        assert not (tmp_path / "asked").exists()


class TestLSF:
    def env(self, folder: Path, *, left: str) -> dict[str, str]:
        stand_in(folder, "bjobs", f'[[ "$*" == *time_left*7001* ]] && echo "{left}"')
        return {"LSB_JOBID": "7001", "LSB_DJOB_NUMPROC": "2"}

    def test_stops_before_the_run_limit_and_goes_on_when_lsf_requeues_it(self, tmp_path: Path, wanted: dict) -> None:
        result = start("train.lsf", tmp_path, **self.env(tmp_path, left="0:3 L"))
        assert result.code == 75, result.text[-3000:]  # that is what LSF puts back
        assert re.search(r'^#BSUB -Q "75"$', (ROOT / "slurm/train.lsf").read_text(), re.MULTILINE)
        result = start("train.lsf", tmp_path, **self.env(tmp_path, left="0:59 L"))
        assert result.code == 0, result.text[-3000:]
        assert_finished(tmp_path / "runs/job-7001", wanted, restart=1)

    def test_not_for_ever(self, tmp_path: Path) -> None:
        folder = tmp_path / "runs/job-7001"
        folder.mkdir(parents=True)
        (folder / "metrics.jsonl").write_text('{"kind": "preempt"}\n' * 20)
        assert start("train.lsf", tmp_path, **self.env(tmp_path, left="0:3 L")).code == 1

    def test_a_failure_does_not_look_like_a_stop(self, tmp_path: Path) -> None:
        env = self.env(tmp_path, left="0:59 L") | {
            "OPTIONS": "--model factories:Faulty --max-steps 9",
            "FAULT": "throw@1",
        }
        assert start("train.lsf", tmp_path, **env).code == 1


def test_apptainer_gets_every_rank(cluster: Cluster, wanted: dict) -> None:
    """The real thing is not in Debian 12."""
    path = stand_in(cluster.folder, "apptainer", '[[ $1 == exec && $2 == my.sif ]] && shift 2 && IN_IMAGE=1 exec "$@"')
    (cluster.folder / "pictures.py").write_text(
        "import os\nfrom hvd_ddp.models import build\n\n\ndef model(num_classes):\n"
        "    assert os.environ['IN_IMAGE'] == '1'\n    return build('convnet', num_classes, (1, 8, 8))\n"
    )
    script = ROOT / "slurm/container.sbatch"
    arguments = ["sbatch", "--parsable", "--ntasks-per-node=1", str(script), *STEPS, "--threads", "1",
                 "--model", "pictures:model"]  # fmt: skip
    result = cluster.run(*arguments, PATH=f"{path}:{environment()['PATH']}", IMAGE="my.sif")
    assert result.code == 0, result.text
    job = Job(cluster, result.out.strip())
    assert job.wait(60) == "COMPLETED", job.log
    assert_finished(cluster.folder / f"runs/job-{job.id}", wanted, restart=0)
