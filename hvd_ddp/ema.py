"""An exponential moving average of the parameters: smoother than the last ones, and often better."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class NoAverage:
    """The model is evaluated as it is."""

    def update(self, updates: int) -> None:
        """Nothing to do."""

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Nothing to exchange."""
        yield

    def state_dict(self) -> dict[str, Tensor]:
        """Nothing to save."""
        return {}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Nothing to load."""


class Average(NoAverage):
    """Of the parameters of `model`, the same on all ranks as they are. Buffers are the model's own.

    Update t moves it by 1 - min(decay, (1 + t) / (10 + t)) towards the parameters: the first ones, far off, fade soon
    (as TensorFlow's ExponentialMovingAverage does with num_updates).
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._parameters = dict(model.named_parameters())
        self._values = {name: parameter.detach().clone() for name, parameter in self._parameters.items()}
        self._decay = decay

    @torch.no_grad()
    def update(self, updates: int) -> None:
        """Take the parameters in, after as many optimizer steps."""
        weight = 1.0 - min(self._decay, (1 + updates) / (10 + updates))
        torch._foreach_lerp_(list(self._values.values()), list(self._parameters.values()), weight)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Inside, the model has the averages as its parameters."""
        before = {name: parameter.detach().clone() for name, parameter in self._parameters.items()}
        self._set(self._values)
        try:
            yield
        finally:
            self._set(before)

    @torch.no_grad()
    def _set(self, values: dict[str, Tensor]) -> None:
        for name, parameter in self._parameters.items():
            parameter.copy_(values[name])

    def state_dict(self) -> dict[str, Tensor]:
        """Name of each parameter -> its average."""
        return dict(self._values)

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Go on from it; KeyError or RuntimeError where it is another model's."""
        for name, value in self._values.items():
            if state[name].shape != value.shape:  # else it would be spread over it
                raise RuntimeError(f"the average of {name} has the shape {tuple(state[name].shape)}")
            value.copy_(state[name])
