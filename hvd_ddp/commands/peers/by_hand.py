"""torch alone: docs.pytorch.org/tutorials/intermediate/ddp_tutorial.html."""

import torch.distributed as dist

from hvd_ddp.commands import bench_bare
from hvd_ddp.commands.peers import Job


def train(job: Job) -> None:
    dist.init_process_group("gloo")
    bench_bare.ddp(job.model, job.optimizer, job.rows, job.inputs, job.targets)
    dist.destroy_process_group()
