"""Optimizers, and learning rates as functions of the optimizer step."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from hvd_ddp.config import TrainConfig
from hvd_ddp.layout import as_it_lies

# What torch's own optimizers keep of a parameter.
STATE: dict[type[Optimizer], set[str]] = {SGD: {"momentum_buffer"}, Adam: {"step", "exp_avg", "exp_avg_sq"}}
NO_MATHEMATICS = {"lr", "initial_lr", "foreach", "fused", "capturable", "differentiable"}  # lr is set before each step


def build(config: TrainConfig, model: nn.Module) -> Optimizer:
    """torch's optimizer of that name, with its own defaults but for lr, momentum, weight decay and `fused`."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    common: Any = {"lr": config.lr, "weight_decay": config.weight_decay, "fused": config.fused and _fuses(model)}
    if config.optimizer == "sgd":
        return SGD(trained, momentum=config.momentum, **common)
    return Adam(trained, **common) if config.optimizer == "adam" else AdamW(trained, **common)


def _fuses(model: nn.Module) -> bool:
    """Whether torch's fused kernels can do it: no complex numbers, no sparse gradients, and no gaps in memory, for they
    take whatever lies between the first number and the last without a word.
    """
    if any(getattr(module, "sparse", False) is True for module in model.modules()):  # Embedding, EmbeddingBag
        return False
    return all(p.is_floating_point() and as_it_lies(p.detach()).is_contiguous() for p in model.parameters())


def load(optimizer: Optimizer, saved: dict[str, Any]) -> None:
    """Take the state of each parameter from what `state_dict` gave. Raises ValueError where it is another optimizer's.

    torch's own looks at numbers of parameters alone, and what does not fit shows within a later step, if at all.
    """
    own = optimizer.state_dict()["param_groups"]
    if len(own) != len(saved["param_groups"]):
        raise ValueError(f"the optimizer has {len(own)} groups of parameters, not {len(saved['param_groups'])}")
    for mine, theirs in zip(own, saved["param_groups"], strict=True):
        for name in (mine.keys() & theirs.keys()) - NO_MATHEMATICS:
            if mine[name] != theirs[name]:
                raise ValueError(f"the optimizer has another `{name}`")
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    wanted = next((names for kind, names in STATE.items() if isinstance(optimizer, kind)), None)
    for index, entry in saved["state"].items():
        if not 0 <= index < len(parameters) or (wanted is not None and not wanted <= entry.keys()):
            raise ValueError(f"the optimizer has no state {sorted(entry)[:8]} of a parameter {index}")
        for name, value in entry.items() if wanted is not None else ():  # what others keep only they know
            if isinstance(value, Tensor):
                _check_state(name, value, parameters[index])
            elif value is not None or name != "momentum_buffer":  # None: sgd had no gradient yet
                raise ValueError(f"`{name}` of the optimizer is a {type(value).__name__}")
    optimizer.load_state_dict({"state": saved["state"], "param_groups": own})
    for parameter, entry in optimizer.state.items():
        for name, value in entry.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape and value.stride() != parameter.stride():
                # Saved without or with --channels-last; fused kernels go through all of them as they lie in memory.
                entry[name] = torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)


def _check_state(name: str, value: Tensor, parameter: Tensor) -> None:
    if value.shape not in ((), parameter.shape) or (name == "step" and value.ndim):
        raise ValueError(f"`{name}` of the optimizer has the shape {tuple(value.shape)}, not {tuple(parameter.shape)}")
    if not value.is_floating_point() or (name == "step" and not 0 <= value < 2**53):
        raise ValueError(f"`{name}` of the optimizer has values that it can't have")


def learning_rate(config: TrainConfig, update: int, *, total: int, steps_per_epoch: int, drops: int) -> float:
    """Rate of the optimizer's step number `update` (from 0) of `total`.

    Warm-up is linear: (update + 1) / warmup_steps. cosine is half a period from lr to 0 over what follows the warm-up
    (Loshchilov and Hutter, SGDR, 2017, without restarts). step counts epochs from the start of training. plateau has
    dropped `drops` times.
    """
    if update < config.warmup_steps:
        return config.lr * (update + 1) / config.warmup_steps
    if config.schedule == "cosine":
        done = (update - config.warmup_steps) / max(1, total - config.warmup_steps)
        return config.lr * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
    if config.schedule == "step":
        return config.lr * config.decay_factor ** (update // (config.decay_every * steps_per_epoch))
    if config.schedule == "plateau":
        return config.lr * config.decay_factor**drops
    return config.lr


def clip(parameters: Iterable[nn.Parameter], limit: float | None) -> Tensor:
    """Scale the whole gradient to a 2-norm of at most `limit`, if there is one; its norm before, a scalar."""
    used = [parameter for parameter in parameters if parameter.grad is not None]
    norm = nn.utils.get_total_norm([parameter.grad for parameter in used if parameter.grad is not None])
    if limit is not None:
        nn.utils.clip_grads_with_norm_(used, limit, norm)
    return norm


def depends_on_length(config: TrainConfig) -> bool:
    """Whether rates already used would have been others in a longer run."""
    return config.schedule == "cosine"
