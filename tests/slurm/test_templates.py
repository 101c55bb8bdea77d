"""What every template must be, and how train.sbatch and its siblings end when a run fails."""

import json
import re
import subprocess
from pathlib import Path

import pytest
from cluster.jobs import Job
from cluster.slurm import Cluster
from launchers import environment, run
from runs import QUIET, TEMPLATES, completed, edited, submit

pytestmark = pytest.mark.timeout(300)
full = pytest.mark.full

DIRECTIVE = {".sbatch": "#SBATCH ", ".pbs": "#PBS ", ".lsf": "#BSUB "}
EVERY = sorted(path.name for path in TEMPLATES.iterdir() if path.suffix in DIRECTIVE)
SBATCH = [name for name in EVERY if name.endswith(".sbatch")]
ON_HOSTS = [name for name in SBATCH if name != "container.sbatch"]  # those that need no image
SIZES = r"(--nodes=|--ntasks=|--ntasks-per-node=|-N ?|-n ?|-np |--nproc-per-node=)(?!1\b)\d"  # one a node is no size


@pytest.mark.parametrize("name", EVERY)
def test_a_template(name: str) -> None:
    path = TEMPLATES / name
    for command in (["bash", "-n"], ["shellcheck"]):
        result = subprocess.run([*command, str(path)], env=environment(), capture_output=True, text=True, timeout=60)
        assert result.returncode == 0, result.stdout + result.stderr
    lines = path.read_text().splitlines()
    assert len(lines) < 45
    assert max(map(len, lines)) <= 120
    begins = [number for number, line in enumerate(lines) if line.startswith("# ---- site: ")]
    ends = [number for number, line in enumerate(lines) if line == "# ----"]
    assert len(begins) == len(ends) == 1
    assert begins[0] < ends[0], "one block for the site"
    kind = DIRECTIVE[path.suffix]
    assert [line for line in lines[begins[0] :] if line.startswith(kind)] == [], "what sbatch is told stands above"
    sizes = [line for line in lines if re.search(SIZES, line) and not line.startswith("#")]
    assert [line for line in sizes if "-N1 -n1" not in line] == [], (
        "node and task counts stand with the directives only"
    )


LONG = "my runs" + 20 * "/far down"
RUN_DIRS = {"": "runs/job-7", "2024": "2024", LONG: LONG, "Läufe/1": "Läufe/1"}


@pytest.mark.parametrize("name", [name for name in EVERY if name != "container.sbatch"])
@pytest.mark.parametrize("given", RUN_DIRS)
def test_it_knows_the_run_directory(name: str, given: str, tmp_path: Path) -> None:
    """As --print-config writes it, which is YAML."""
    lines = (TEMPLATES / name).read_text().splitlines()
    begin = next(number for number, line in enumerate(lines) if line.startswith("config="))
    end = next(number for number, line in enumerate(lines) if "()" in line)
    script = 'options=("$@")\n' + "\n".join(lines[begin:end]) + '\necho "$run_dir"'
    options = ["--run-dir", given] if given else []
    jobs = {"SLURM_JOB_ID": "7", "PBS_JOBID": "7", "LSB_JOBID": "7"}
    result = run(["bash", "-uc", script, "-", *options], cwd=tmp_path, **jobs)
    assert result.out == RUN_DIRS[given] + "\n", result.err


@pytest.mark.parametrize("name", SBATCH)
def test_slurm_takes_it(name: str, two: Cluster) -> None:
    result = two.run("sbatch", "--test-only", str(TEMPLATES / name), "--data", "digits")
    assert result.code == 0, result.text
    assert "using 4 processors on nodes node[1-2]" in result.text


@pytest.mark.parametrize("name", ON_HOSTS)
def test_a_bad_option_ends_the_job_in_the_batch_shell(name: str, two: Cluster, tmp_path: Path) -> None:
    """Of a copy in another folder: it needs nothing that lies beside it."""
    two.folder = tmp_path
    script = edited(name, tmp_path)
    job = submit(two, script, "", "--max-steps", "0")
    assert job.wait(60) == "FAILED"
    assert (job.exit_code, job.requeues) == (2, 0)
    assert job.log.count("--max-steps is `0`") == 1, job.log
    assert "srun" not in job.log
    assert list(tmp_path.glob("runs*")) == []


@pytest.mark.parametrize(
    "name", ["train.sbatch", *[pytest.param(name, marks=full) for name in ON_HOSTS if name[:3] != "tra"]]
)
def test_a_run_that_fails_is_not_requeued(name: str, two: Cluster, tmp_path: Path) -> None:
    """Though the start before was told to stop: that one went back into the queue, this one does not."""
    two.folder = tmp_path
    (tmp_path / "2024").mkdir()
    (tmp_path / "2024/summary.json").write_text('{"status": "preempted", "restart": 0}\n')
    job = submit(two, name, "-N2 --ntasks-per-node=1", "--model", "paced:Broken", "--run-dir", "2024")
    assert job.wait(120) == "FAILED"
    assert job.exit_code == 1 or (name == "torchrun.sbatch" and job.exit_code == 143)  # the agent that was slower
    assert job.requeues == 0
    assert "RuntimeError: no such sensor" in job.log
    assert job.log.count("hvd_ddp: rank") == 1, job.log


@full
def test_what_only_the_ranks_can_refuse(two: Cluster, tmp_path: Path) -> None:
    two.folder = tmp_path
    job = submit(two, "train.sbatch", "-N2 --ntasks-per-node=1", "--global-batch", "5000")
    assert job.wait(120) == "FAILED"
    assert (job.exit_code, job.requeues) == (2, 0)
    assert job.log.count("--global-batch is `5000`") == 1, job.log


@full
@pytest.mark.parametrize("name", ON_HOSTS)
def test_options_reach_the_run_as_they_are(name: str, two: Cluster, tmp_path: Path) -> None:
    two.folder = tmp_path
    folder = "my runs/the first"
    job = submit(two, name, "-N2 --ntasks-per-node=1", "--max-steps", "2", "--lr", "0.25", "--run-dir", folder)
    completed(job, 120)
    assert "\nlr: 0.25\n" in (tmp_path / folder / "config.yaml").read_text()


def test_submitted_by_its_command(two: Cluster, tmp_path: Path) -> None:
    """Nodes, ranks and options reach the job."""
    two.folder = tmp_path
    size = ["--nodes", "2", "--ranks-per-node", "1", "--time", "00:10", "--name", "mine"]
    training = ["--threads", "1", "--max-steps", "2", "--run-dir", "run"]
    result = two.run("python", "-m", "hvd_ddp", "submit", *size, "--", *training, **QUIET)
    assert result.code == 0, result.text
    job = Job(two, result.out.split()[-1])
    completed(job, 120)
    assert (job.info()["JobName"], job.info()["TimeLimit"]) == ("mine", "00:10:00")
    assert json.loads((tmp_path / "run/summary.json").read_text())["world_size"] == 2
