"""Accelerate: huggingface.co/docs/accelerate/basic_tutorials/migration."""

from accelerate import Accelerator
from torch.nn import functional

from hvd_ddp.commands.peers import Job


def train(job: Job) -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(job.model, job.optimizer)
    for rows in job.rows:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(job.inputs[rows]), job.targets[rows])
        accelerator.backward(loss)
        optimizer.step()
    accelerator.end_training()
