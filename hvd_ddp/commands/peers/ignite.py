"""ignite: docs.pytorch.org/ignite/distributed.html."""

import ignite.distributed as idist
from ignite.engine import create_supervised_trainer
from torch.nn import functional

from hvd_ddp.commands.peers import Batches, Job


def train(job: Job) -> None:
    with idist.Parallel(backend="gloo") as parallel:
        parallel.run(_train, job)


def _train(_: int, job: Job) -> None:
    model, optimizer = idist.auto_model(job.model), idist.auto_optim(job.optimizer)
    trainer = create_supervised_trainer(model, optimizer, functional.cross_entropy, device=idist.device())
    trainer.run(Batches(job), max_epochs=1)
