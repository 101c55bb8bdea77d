"""Names -> models."""

from __future__ import annotations

import difflib
import inspect
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _NormBase

from hvd_ddp.errors import HvdDDPError

SIDE = 8  # pixels of what ConvNet's last layers see


class Pool(nn.Module):
    """AdaptiveAvgPool2d(size), sooner: torch's own takes as long over images that have the size already as over larger
    ones. (n, C, H, W) -> (n, C, size, size).
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, inputs: Tensor) -> Tensor:
        size, (height, width) = self.size, inputs.shape[-2:]
        if (height, width) == (size, size):
            return inputs
        if height % size or width % size:
            return functional.adaptive_avg_pool2d(inputs, size)
        return functional.avg_pool2d(inputs, (height // size, width // size))


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
            Pool(SIDE),
        )
        self.classifier = nn.Sequential(nn.Linear(128 * SIDE * SIDE, 256), nn.ReLU(), nn.Linear(256, num_classes))

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.classifier(self.features(inputs).flatten(1))
        return outputs


def move(model: nn.Module, device: torch.device, dtype: torch.dtype, *, channels_last: bool) -> nn.Module:
    """The same model, there and in these numbers; its convolutions with or without their channels last in memory."""
    model = model.to(device, dtype)
    return model.to(memory_format=torch.channels_last) if channels_last else model


@contextmanager
def left_alone(norms: list[_NormBase]) -> Iterator[None]:
    """Keep what is computed inside out of the running statistics of these layers, and use those."""
    training = [norm for norm in norms if norm.training]
    for norm in training:
        norm.eval()
    try:
        yield
    finally:
        for norm in training:
            norm.train()


SMALL = 64  # pixels a side up to which resnet18 has the stem for small images
_WITHOUT_SIDE_OUTPUTS = {"aux_logits": False, "init_weights": True}
_EXTRA: dict[str, dict[str, bool]] = {"googlenet": _WITHOUT_SIDE_OUTPUTS, "inception_v3": _WITHOUT_SIDE_OUTPUTS}


def build(name: str, num_classes: int | None, shape: tuple[int, ...]) -> nn.Module:
    """The model of that name for samples of `shape`, or what `module:factory` makes of `num_classes`.

    That is None for data whose targets are no classes, where its factory has not said how many there are.

    Raises HvdDDPError for an unknown name, and for a model that can't take such samples.
    """
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
    if name != "convnet" and name not in (names := _torchvision_names()):
        near = difflib.get_close_matches(name, ["convnet", *names], 1)
        raise HvdDDPError(
            f"--model is `{name}`, which is none of: convnet, or module:factory, or a classification model of "
            f"torchvision ({', '.join(names[:3])}, ...)." + (f" Did you mean {near[0]}?" if near else "")
        )
    if num_classes is None:
        raise HvdDDPError(
            f"--model {name} has an output for each class, and how many there are this data does not say. Return "
            "(train, eval, num_classes) from its factory, or use --model module:factory."
        )
    if len(shape) != 3:
        raise HvdDDPError(
            f"--model {name} takes images, (channels, height, width), and these samples have the shape `{shape}`. Use "
            "--model module:factory with a model of your own."
        )
    return ConvNet(num_classes, shape[0]) if name == "convnet" else _from_torchvision(name, num_classes, shape)


def _torchvision_names() -> list[str]:
    from torchvision import models as vision  # 1.4 s and 164 MB: only where it is used

    return list(vision.list_models(module=vision))  # its own level: detection, video and so on have modules below


def _from_torchvision(name: str, num_classes: int, shape: tuple[int, ...]) -> nn.Module:
    """Without weights; the first convolution takes as many channels as there are."""
    from torchvision import models as vision

    extra: dict[str, Any] = dict(_EXTRA.get(name, {}))
    if name.startswith("vit_"):
        extra["image_size"] = shape[1]
    try:
        model: nn.Module = vision.get_model(name, weights=None, num_classes=num_classes, **extra)
        if name == "resnet18" and max(shape[1:]) <= SMALL:
            _small_stem(model, shape[0])
        elif shape[0] != 3:
            _first_convolution(model, shape[0])
        model.eval()
        with torch.no_grad():
            outputs = model(torch.zeros(1, *shape))
        assert outputs.shape == (1, num_classes)
    except (RuntimeError, ValueError, AssertionError) as error:
        raise HvdDDPError(
            f"--model {name} can't take images of the shape `{shape}`: `{' '.join(str(error).split())[:200]}`. Use "
            "larger images or another model."
        ) from error
    return model.train()


def _small_stem(model: Any, channels: int) -> None:
    """ResNet for 32x32 (He et al. 2015, section 4.2): 3x3 with stride 1 in front, and no pooling."""
    model.conv1 = nn.Conv2d(channels, 64, 3, padding=1, bias=False)
    nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")  # as torchvision's others
    model.maxpool = nn.Identity()


def _first_convolution(model: nn.Module, channels: int) -> None:
    path, old = next((path, module) for path, module in model.named_modules() if isinstance(module, nn.Conv2d))
    new = nn.Conv2d(
        channels,
        old.out_channels,
        old.kernel_size,  # type: ignore[arg-type]
        stride=old.stride,  # type: ignore[arg-type]
        padding=old.padding,  # type: ignore[arg-type]
        bias=old.bias is not None,
    )
    parent, _, attribute = path.rpartition(".")
    setattr(model.get_submodule(parent), attribute, new)


def load_factory(option: str, name: str) -> Callable[..., Any]:
    """`module:factory`, importable from the working directory."""
    module_name, _, attribute = name.partition(":")
    _look_here()
    try:
        factory = getattr(import_module(module_name), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise HvdDDPError(
            f"{option} `{name}` can't be loaded: {error}. Give module:factory, importable from `{os.getcwd()}`."
        ) from error
    if not callable(factory):
        raise HvdDDPError(f"{option} `{name}` is a {type(factory).__name__}, not a function. Name one.")
    return factory  # type: ignore[no-any-return]


def is_own_code(name: str) -> bool:
    """Whether `module:factory` is of the user's own files: neither of Python's library, nor installed, nor of hvd_ddp.

    For names that a file brings: `os:system` is a factory as well. Raises HvdDDPError like `load_factory`.
    """
    _look_here()
    if not _is_own(name.partition(":")[0]):
        return False
    factory = load_factory("the checkpoint's", name)
    return _is_own(getattr(factory, "__module__", None) or "builtins")  # not what it has imported from elsewhere


def _is_own(module: str) -> bool:
    top = module.partition(".")[0]
    try:
        spec = find_spec(top)
    except (ImportError, ValueError):
        spec = None
    if spec is None or top == "hvd_ddp":
        return False
    places = [Path(place).resolve() for place in (spec.origin, *(spec.submodule_search_locations or ())) if place]
    library = [Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    return any(place.exists() for place in places) and not any(
        place.is_relative_to(root) or {"site-packages", "dist-packages"} & {*place.parts}
        for place in places
        for root in library
    )


def _look_here() -> None:
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
