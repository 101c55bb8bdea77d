"""Independent references: plain loops that use nothing of hvd_ddp. They are given which samples each step uses."""

import copy
import math

import torch
from torch import nn
from torch.nn import functional


def rate(options: dict, step: int, total: int) -> float:
    """The rates of the cases: warm-up, then constant or cosine."""
    warmup = options.get("warmup_steps", 0)
    if step < warmup:
        return options["lr"] * (step + 1) / warmup
    if options.get("schedule") == "cosine":
        return options["lr"] * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (total - warmup)))
    return options["lr"]


def optimizer_of(model: nn.Module, options: dict) -> torch.optim.Optimizer:
    decay = options.get("weight_decay", 0.0)
    if options["optimizer"] == "sgd":
        return torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9, weight_decay=decay)
    cls = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[options["optimizer"]]
    return cls(model.parameters(), lr=1.0, weight_decay=decay)


def one_process(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor, steps: list, options: dict) -> nn.Module:
    """Plain training: the mean loss over each step's samples, clipping, a step."""
    optimizer = optimizer_of(model, options)
    for number, samples in enumerate(steps):
        optimizer.param_groups[0]["lr"] = rate(options, number, len(steps))
        optimizer.zero_grad()
        loss = functional.cross_entropy(
            model(inputs[samples]), targets[samples], label_smoothing=options.get("label_smoothing", 0.0)
        )
        loss.backward()
        if "clip_norm" in options:
            nn.utils.clip_grad_norm_(model.parameters(), options["clip_norm"])
        optimizer.step()
    return model


def same_shares(
    model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor, shares: list, options: dict, steps_per_epoch: int
) -> nn.Module:
    """One model a rank, in one process: `shares[step][rank]` is a list of micro-batches, some of them empty.

    Gradients of each rank's part of the mean are averaged by hand; buffers at the end of each epoch, where the
    trainer evaluates.
    """
    num_ranks = len(shares[0])
    ranks = [copy.deepcopy(model) for _ in range(num_ranks)]
    optimizers = [optimizer_of(rank, options) for rank in ranks]
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=options.get("precision") == "bf16")
    for number, step in enumerate(shares):
        total = sum(len(micro) for share in step for micro in share)
        for rank, optimizer, share in zip(ranks, optimizers, step, strict=True):
            optimizer.param_groups[0]["lr"] = rate(options, number, len(shares))
            for parameter in rank.parameters():
                parameter.grad = torch.zeros_like(parameter)
            for micro in share:
                if len(micro):
                    with autocast:
                        losses = functional.cross_entropy(rank(inputs[micro]), targets[micro], reduction="none")
                    (losses.sum() * (num_ranks / total)).backward()
        for parameters in zip(*(rank.parameters() for rank in ranks), strict=True):
            mean = sum(parameter.grad for parameter in parameters) / num_ranks
            for parameter in parameters:
                parameter.grad = mean.clone()
        for optimizer in optimizers:
            optimizer.step()
        if (number + 1) % steps_per_epoch == 0 or number + 1 == len(shares):
            average_buffers(ranks)
    return ranks[0]


def average_buffers(ranks: list[nn.Module]) -> None:
    for buffers in zip(*(rank.buffers() for rank in ranks), strict=True):
        if buffers[0].is_floating_point():
            mean = sum(buffers) / len(ranks)
            for buffer in buffers:
                buffer.copy_(mean)
