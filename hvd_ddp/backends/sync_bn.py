"""BatchNorm over the samples of all ranks: one for every backend and device.

torch.nn.SyncBatchNorm and hvd.SyncBatchNorm take tensors of GPUs only, and each runs over its own backend alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

AllReduce = Callable[[Tensor], Tensor]  # the sum over ranks


def synchronized(model: nn.Module, all_reduce: AllReduce) -> nn.Module:
    """The model with each BatchNorm replaced; parameters, buffers and their names stay the same ones."""
    if isinstance(model, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d):
        return SyncBatchNorm(model, all_reduce)
    for name, child in model.named_children():
        setattr(model, name, synchronized(child, all_reduce))
    return model


class SyncBatchNorm(_BatchNorm):
    """In training normalises with mean and variance over all ranks, however many samples each has (at least one)."""

    def __init__(self, norm: _BatchNorm, all_reduce: AllReduce) -> None:
        super().__init__(norm.num_features, norm.eps, norm.momentum, norm.affine, norm.track_running_stats)
        for name, tensor in (*norm.named_parameters(), *norm.named_buffers()):
            setattr(self, name, tensor)
        self._check_input_dim = norm._check_input_dim  # type: ignore[method-assign]
        self._all_reduce = all_reduce
        self.train(norm.training)

    def forward(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)  # type: ignore[no-untyped-call]
        if not self.training and self.running_mean is not None:
            return functional.batch_norm(
                input, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps
            )
        output, mean, var, count = _Normalise.apply(input, self.weight, self.bias, self.eps, self._all_reduce)
        if self.training and self.running_mean is not None and self.running_var is not None:
            self._track(mean, var * (count / (count - 1)))
        return output  # type: ignore[no-any-return]

    @torch.no_grad()
    def _track(self, mean: Tensor, var: Tensor) -> None:
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        factor = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        for running, value in ((self.running_mean, mean), (self.running_var, var)):
            assert running is not None
            running.lerp_(value.to(running.dtype), factor)


class _Normalise(torch.autograd.Function):
    """Forward and backward of BatchNorm, each with one all_reduce of two numbers a channel (Ioffe, Szegedy 2015)."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, input: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, all_reduce: AllReduce
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        x = input if input.dtype == torch.float64 else input.float()
        dims = [0, *range(2, x.dim())]
        local = torch.tensor([x.numel() // x.size(1)], dtype=torch.float64, device=x.device)
        # Centred on this rank's own mean first, then combined in float64: sums of squares lose no digits that count.
        var, mean = (value.double() for value in torch.var_mean(x, dims, correction=0))
        sums = all_reduce(torch.cat([local, local * mean, local * (var + mean * mean)]))
        count, (mean, squares) = sums[:1], (sums[1:] / sums[:1]).chunk(2)
        var = (squares - mean * mean).clamp_(min=0)
        scale = (var + eps).rsqrt()
        normal = (x - _wide(mean, x)) * _wide(scale, x)
        ctx.save_for_backward(normal, weight, scale, count)
        ctx.all_reduce, ctx.has_bias, ctx.dtype = all_reduce, bias is not None, input.dtype
        output = normal if weight is None or bias is None else normal * _wide(weight, x) + _wide(bias, x)
        ctx.mark_non_differentiable(mean, var, count)
        return output.to(input.dtype), mean, var, count

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        normal, weight, scale, count = ctx.saved_tensors
        grad = grads[0].to(normal.dtype)
        dims = [0, *range(2, grad.dim())]
        sum_grad, sum_product = grad.sum(dims), (grad * normal).sum(dims)  # this rank's; the backend averages them
        sums = ctx.all_reduce(torch.cat([sum_grad, sum_product]).double()) / count
        mean_grad, mean_product = sums.chunk(2)
        inner = grad - _wide(mean_grad, grad) - normal * _wide(mean_product, grad)
        inner = inner * _wide(scale if weight is None else scale * weight, grad)
        if weight is None:
            return inner.to(ctx.dtype), None, None, None, None
        return (
            inner.to(ctx.dtype),
            sum_product.to(weight.dtype),
            sum_grad.to(weight.dtype) if ctx.has_bias else None,
            None,
            None,
        )


def _wide(values: Tensor, like: Tensor) -> Tensor:
    """(C,) -> (1, C, 1, ...) in the dtype of `like`."""
    return values.to(like.dtype).view(1, -1, *[1] * (like.dim() - 2))
