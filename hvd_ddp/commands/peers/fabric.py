"""Lightning Fabric: lightning.ai/docs/fabric/stable/fundamentals/convert.html."""

from lightning.fabric import Fabric
from torch.nn import functional

from hvd_ddp.commands.peers import Job


def train(job: Job) -> None:
    fabric = Fabric(accelerator="cpu", devices=job.launch.world_size, strategy="ddp")
    fabric.launch()
    model, optimizer = fabric.setup(job.model, job.optimizer)
    for rows in job.rows:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(job.inputs[rows]), job.targets[rows])
        fabric.backward(loss)
        optimizer.step()
