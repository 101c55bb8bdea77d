"""hvd_ddp's trainer as it is under mpirun, by whose MPI the gradients travel."""

from hvd_ddp.commands.peers import Job, ours


def train(job: Job) -> None:
    ours.train(job, "mpi")
