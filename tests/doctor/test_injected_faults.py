"""The faults that doctor finds: each is injected by a test, on real ranks, hosts and files wherever that can be."""

import ast

import pytest
from launchers import ROOT

CHECKS, LAUNCHERS, SHARED, HOSTS = (
    "doctor/test_checks.py", "doctor/test_launchers.py", "doctor/test_report.py", "slurm/test_doctor.py",
)  # fmt: skip
MACHINE = (CHECKS, "test_a_machine_on_which_nothing_is_right")
SEVERAL = (HOSTS, "test_faults_of_single_hosts_and_ranks")
RANKS = (LAUNCHERS, "test_ranks_in_each_others_way")

# fault: the test that injects it and looks for its name, its rank and a remedy
FAULTS = {
    # on several hosts of a real Slurm
    "a clock off by a minute": SEVERAL,
    "one rank with another torch": SEVERAL,
    "Horovod built for another torch": SEVERAL,
    "a host name that is loopback": SEVERAL,
    "a tiny /dev/shm": SEVERAL,
    "no data on some hosts": SEVERAL,
    "a read-only data directory": SEVERAL,
    "srun without the type of the MPI": SEVERAL,
    "ports blocked between two hosts": (HOSTS, "test_ports_are_closed_between_two_hosts"),
    "rank 0 out of reach": (HOSTS, "test_rank_0_is_behind_a_wall"),
    "no common file system": (HOSTS, "test_no_common_files"),
    "a batch shell taken for a step": (HOSTS, "test_the_batch_shell_is_no_step"),
    "an interface that is not there": (HOSTS, "test_an_interface_that_is_not_there"),
    "a rank that never starts": (HOSTS, "test_a_rank_that_never_starts"),
    # on several ranks under a real mpirun
    "Horovod without MPI under mpirun": RANKS,
    "OMP_NUM_THREADS unset with several ranks": RANKS,
    "ranks bound to one core": RANKS,
    "one rank without torch": RANKS,
    "an MPI that aborts": (LAUNCHERS, "test_mpi_ends_the_job_in_the_last_check"),
    # in one process, with namespaces of its own where the fault is one of the system
    "a read-only run directory": MACHINE,
    "a host name without address": MACHINE,
    "few ports": MACHINE,
    "few open files": MACHINE,
    "more threads than cores": MACHINE,
    "no port free": (CHECKS, "test_all_ports_are_taken_and_the_disk_is_full"),
    "a full disk": (CHECKS, "test_all_ports_are_taken_and_the_disk_is_full"),
    "variables of ranks that contradict each other": (CHECKS, "test_variables_that_contradict_each_other"),
    "a torch that crashes, hangs or is another file": (CHECKS, "test_torch_is_broken"),
    "a Horovod that does not load": (CHECKS, "test_horovod_does_not_load"),
    "no Horovod under horovodrun": (CHECKS, "test_no_horovod"),
    "another MPI than the launcher's": (CHECKS, "test_another_mpi_than_the_launchers"),
    "no MPI": (CHECKS, "test_no_mpi"),
    "a Slurm that does not answer": (CHECKS, "test_srun_does_not_answer"),
    # by what ranks would tell, for want of the hardware
    "Horovod without NCCL beside GPUs": (CHECKS, "test_horovod_without_nccl_beside_gpus"),
    "more ranks than GPUs": (SHARED, "test_more_ranks_than_gpus"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_it_is_injected(fault: str) -> None:
    file, test = FAULTS[fault]
    tree = ast.parse((ROOT / "tests" / file).read_text())
    assert test in [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
