"""A loop of your own, without the trainer. It prints the same on any number of ranks, up to rounding.

torchrun --nproc-per-node 2 -m hvd_ddp.examples.own_loop
horovodrun -np 2 python -m hvd_ddp.examples.own_loop
srun -n 2 python -m hvd_ddp.examples.own_loop
"""

import torch
from torch import nn, optim
from torch.nn import functional

from hvd_ddp import Backend, connect
from hvd_ddp.data.sampler import GlobalBatchSampler, share
from hvd_ddp.examples.own_model_and_data import Network, spirals

GLOBAL_BATCH = 32  # samples a step, over all ranks


def main(backend: Backend) -> None:
    device, rank, world_size = backend.device, backend.launch.rank, backend.launch.world_size
    train, evaluation, num_classes = spirals()
    inputs, targets = (part.to(device) for part in train.tensors)
    torch.manual_seed(0)
    model = Network(num_classes).to(device)
    # Every rank gets the weights of rank 0.
    wrapped, optimizer = backend.prepare(model, optim.Adam(model.parameters(), lr=0.01))
    for epoch in range(4):
        # Each sample once an epoch, on any number of ranks; `num` is how many all ranks together use in this step.
        sampler = GlobalBatchSampler(len(inputs), GLOBAL_BATCH, rank=rank, world_size=world_size, seed=0, epoch=epoch)
        for indices, num in sampler:
            mine = torch.from_numpy(indices).to(device)
            losses = functional.cross_entropy(wrapped(inputs[mine]), targets[mine], reduction="none")
            # Ranks average their gradients: times world_size / num that is the mean over just these samples.
            (losses.sum() * (world_size / num)).backward()
            with backend.synchronize(optimizer):  # in here gradients are averaged and complete
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
            optimizer.zero_grad()
        # Each rank looks at its share with the bare model; then they add up.
        points, arms = (part[share(len(evaluation), rank, world_size)].to(device) for part in evaluation.tensors)
        with torch.no_grad():
            right = (model(points).argmax(1) == arms).sum()
        total = int(backend.all_reduce(right))
        if backend.is_main:
            print(f"epoch {epoch}: {total} of {len(evaluation)} right", flush=True)


if __name__ == "__main__":
    with connect() as backend:
        main(backend)
