"""What every rank of test_mpi_group.py runs: stock DDP and torch's collectives over Gloo and over MPI."""

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from hvd_ddp import connect

FORMS = ["plain", "static graph", "unused parameters", "fp16", "bf16", "PowerSGD"]


def trained(form: str) -> torch.Tensor:
    """All parameters after six steps with eleven buckets, so that several are under way at once."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(300, 300) for _ in range(5)])
    wrapped = DistributedDataParallel(
        model,
        bucket_cap_mb=0.3,
        gradient_as_bucket_view=True,
        find_unused_parameters=form == "unused parameters",
        static_graph=form == "static graph",
    )
    if form == "fp16":
        wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif form == "bf16":
        wrapped.register_comm_hook(None, default_hooks.bf16_compress_hook)
    elif form == "PowerSGD":
        state = PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
        wrapped.register_comm_hook(state, powerSGD_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    mine = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(6):
        wrapped(torch.randn(16, 300, generator=mine)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def collectives() -> dict[str, object]:
    """Each of torch's collectives that the group has, on values that tell the ranks apart."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    found: dict[str, object] = {}
    gathered = [None] * ranks
    dist.all_gather_object(gathered, {"of": rank})
    found["all_gather_object"] = gathered
    objects = [{"of": rank}]
    dist.broadcast_object_list(objects, src=ranks - 1)
    found["broadcast_object_list"] = list(objects)
    gathered = [None] * ranks if rank == 0 else None
    dist.gather_object({"of": rank}, gathered)
    found["gather_object"] = gathered
    dist.scatter_object_list(objects, [f"for {r}" for r in range(ranks)] if rank == 0 else None)
    found["scatter_object_list"] = objects
    for name in ("SUM", "AVG", "MAX", "MIN", "PRODUCT"):
        for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
            # Of 16-bit floats more than one message's worth, transposed.
            tensor = torch.full((3, 5000), rank + 2.0, dtype=dtype).t()
            dist.all_reduce(tensor, getattr(dist.ReduceOp, name), async_op=dtype == torch.float32)
            dist.barrier()
            found[f"{name} of {dtype}"] = tensor.unique().tolist()
    flags = torch.tensor([rank == 0, False])
    dist.broadcast(flags, 0)
    found["broadcast"] = flags.tolist()
    total = torch.tensor([float(rank)])
    dist.reduce(total, 1)
    found["reduce"] = total.item() if rank == 1 else None
    everyone = dist.new_group(list(range(ranks)))
    alone = dist.new_group([1])
    for name, group in (("everyone", everyone), ("alone", alone)):
        total = torch.ones(1)
        if name == "everyone" or rank == 1:
            dist.all_reduce(total, group=group)
        found[name] = total.item()
    return found


def refusals() -> dict[str, str]:
    """What comes of a collective that can't be done, here and now and by way of a future."""
    said = {}
    for name, later in (("now", False), ("later", True)):
        try:
            work = dist.all_reduce(torch.zeros(2, dtype=torch.bool), async_op=later)
            said[name] = f"nothing raised: {work and work.wait()}"
        except RuntimeError as error:
            said[name] = f"{type(error).__name__}: {error}"
    return said


def main() -> None:
    out = Path(sys.argv[1])
    seen: dict[str, object] = {}
    for transport in ("gloo", "mpi"):
        with connect("ddp", transport, "cpu", threads=1, directory=out, timeout=60) as backend:
            for form in FORMS:
                if (transport, form) != ("gloo", "PowerSGD"):  # hangs over Gloo: its callbacks race (torch 2.14)
                    torch.save(trained(form), out / f"{form} {transport} {backend.launch.rank}.pt")
            if transport == "mpi":
                seen["collectives"] = collectives()
                seen["refusals"] = refusals()
    with connect("ddp", "mpi", "cpu", threads=1, directory=out, timeout=3) as backend:
        if backend.is_main:
            began = time.monotonic()
            try:
                dist.all_reduce(torch.ones(1))
            except RuntimeError as error:
                seen["nobody came"] = [str(error), time.monotonic() - began, backend.lost_a_peer(error)]
        (out / f"rank{backend.launch.rank}.json").write_text(json.dumps(seen))
        time.sleep(0 if backend.is_main else 20)  # mpirun ends it
        raise RuntimeError("an end in the middle")


if __name__ == "__main__":
    main()
