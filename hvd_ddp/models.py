"""Names -> models."""

from __future__ import annotations

import difflib
import inspect
import os
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

from torch import Tensor, nn

from hvd_ddp.errors import HvdDDPError


class ConvNet(nn.Module):
    """The small network of the CIFAR tutorials: two 3x3 convolutions (64, 128), pooling to 8x8, 256 hidden units.

    (n, in_channels, H, W) -> (n, num_classes), any H and W.
    """

    def __init__(self, num_classes: int, in_channels: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(in_channels, 64, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(64, 128, 3, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(8),
        )
        self.classifier = nn.Sequential(nn.Linear(128 * 8 * 8, 256), nn.ReLU(), nn.Linear(256, num_classes))

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.classifier(self.features(inputs).flatten(1))
        return outputs


MODELS: dict[str, Callable[[int, int], nn.Module]] = {"convnet": ConvNet}


def build(name: str, num_classes: int, in_channels: int) -> nn.Module:
    """The model of that name, or what `module:factory` makes of `num_classes`. Raises HvdDDPError."""
    if name in MODELS:
        return MODELS[name](num_classes, in_channels)
    if ":" in name:
        factory = load_factory("--model", name)
        try:
            inspect.signature(factory).bind(num_classes)
        except TypeError as error:
            raise HvdDDPError(f"--model `{name}` can't be called as factory(num_classes): {error}. Mend it.") from error
        model = factory(num_classes)
        if not isinstance(model, nn.Module):
            raise HvdDDPError(
                f"--model `{name}` made a {type(model).__name__}, not a torch.nn.Module. Return a module."
            )
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise HvdDDPError(f"--model `{name}` made a model without a parameter to train. Return one that has some.")
        return model
    near = difflib.get_close_matches(name, MODELS, 1)
    raise HvdDDPError(
        f"--model is `{name}`, which is none of: {', '.join(MODELS)}, or module:factory."
        + (f" Did you mean {near[0]}?" if near else "")
    )


def load_factory(option: str, name: str) -> Callable[..., Any]:
    """`module:factory`, importable from the working directory."""
    module_name, _, attribute = name.partition(":")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        factory = getattr(import_module(module_name), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise HvdDDPError(
            f"{option} `{name}` can't be loaded: {error}. Give module:factory, importable from `{os.getcwd()}`."
        ) from error
    if not callable(factory):
        raise HvdDDPError(f"{option} `{name}` is a {type(factory).__name__}, not a function. Name one.")
    return factory  # type: ignore[no-any-return]
