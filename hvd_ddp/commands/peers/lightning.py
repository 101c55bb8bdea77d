"""Lightning: lightning.ai/docs/pytorch/stable/starter/introduction.html."""

import lightning
from torch import Tensor
from torch.nn import functional
from torch.optim import Optimizer

from hvd_ddp.commands.peers import Batches, Job


class Classifier(lightning.LightningModule):  # type: ignore[misc,unused-ignore]
    def __init__(self, job: Job) -> None:
        super().__init__()
        self.model, self._optimizer = job.model, job.optimizer

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        inputs, targets = batch
        return functional.cross_entropy(self.model(inputs), targets)

    def configure_optimizers(self) -> Optimizer:
        return self._optimizer


def train(job: Job) -> None:
    trainer = lightning.Trainer(
        accelerator="cpu", devices=job.launch.world_size, strategy="ddp", max_epochs=1, use_distributed_sampler=False,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Classifier(job), Batches(job))
