"""Whether all ranks still hold the same model: what is trained in data-parallel is one model, copied."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hvd_ddp.backends.base import Backend
from hvd_ddp.errors import HvdDDPError

PIECE = 1 << 18  # numbers that stay in a core's cache


@torch.no_grad()
def check_replicas(
    backend: Backend, model: nn.Module, optimizer: Optimizer, *, step: int, buffers: bool = False
) -> None:
    """Raise HvdDDPError, on every rank alike, where ranks differ in a parameter or in the optimizer's state.

    Compares a checksum of each tensor's bits: one all_reduce of two numbers a tensor. `buffers` counts those of the
    model as well; they are alike only after they were averaged.
    """
    if backend.launch.world_size == 1:
        return
    backend.meeting.pulse.at("meeting the others")
    tensors = _tensors(model, optimizer, buffers=buffers)
    sums = torch.stack([_checksum(tensor) for tensor in tensors.values()]).to(backend.device)
    highest, lowest = backend.all_reduce(torch.cat([sums, -sums]), "max").chunk(2)
    differ = (highest != -lowest).nonzero().flatten().tolist()
    if not differ:
        return
    names = list(tensors)
    firsts = backend.all_gather_object(int(sums[differ[0]]))
    others = [rank for rank, value in enumerate(firsts) if value != firsts[0]]
    more = f" and {len(differ) - 1} more" if len(differ) > 1 else ""
    raise HvdDDPError(
        f"The ranks no longer train one model: after step {step} {names[differ[0]]}{more} differs between rank 0 and "
        f"rank{'s' if len(others) > 1 else ''} {_few(others)}. Some update did not come from gradients averaged over "
        "all ranks (a step that calls the bare model, or changes it by itself), or a machine computes wrongly. "
        "Nothing of it is saved. Mend the step; the same command then goes on from the last checkpoint."
    )


def _tensors(model: nn.Module, optimizer: Optimizer, *, buffers: bool) -> dict[str, Tensor]:
    """By the names that errors call them."""
    parameters = dict(model.named_parameters())
    found = {f"parameter `{name}`": parameter.detach() for name, parameter in parameters.items()}
    for name, parameter in parameters.items():
        for kind, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                found[f"the optimizer's `{kind}` of `{name}`"] = value
    if buffers:
        found |= {f"buffer `{name}`": buffer for name, buffer in model.named_buffers()}
    return found


def _checksum(tensor: Tensor) -> Tensor:
    """The sum of the tensor's bits, taken as whole numbers of 4 bytes where they fit: int64 ()."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if flat.numel() % 4 == 0 and flat.storage_offset() % 4 == 0:
        flat = flat.view(torch.int32)
    # In pieces: torch first makes whole numbers of 8 bytes of all that it adds up.
    return torch.stack([piece.sum(dtype=torch.int64) for piece in flat.split(PIECE)]).sum()


def _few(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return shown if len(ranks) <= 8 else f"{shown} and {len(ranks) - 8} more"
