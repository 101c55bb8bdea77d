"""Names -> models: the number of classes, the channels, and what can't be."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torchvision import models as vision

from hvd_ddp.backends.base import Backend
from hvd_ddp.backends.sync_bn import SyncBatchNorm, synchronized
from hvd_ddp.errors import HvdDDPError
from hvd_ddp.job.launch import Launch
from hvd_ddp.models import Pool, build

NAMES = vision.list_models(module=vision)
TRIED = [name for name in NAMES if "regnet" not in name or "400mf" in name]  # these compute as they are built


@pytest.mark.parametrize("name", TRIED)
@pytest.mark.parametrize("channels", [1, 3])
def test_every_classification_model_of_torchvision(name: str, channels: int) -> None:
    """Shapes only: on the meta device nothing is computed."""
    size = 299 if name == "inception_v3" else 224
    with torch.device("cpu" if "regnet" in name else "meta"):
        model = build(name, 7, (channels, size, size))
        assert model.training
        assert model.eval()(torch.zeros(2, channels, size, size)).shape == (2, 7)
    (first,) = [module for module in model.modules() if isinstance(module, nn.Conv2d)][:1]
    assert first.in_channels == channels


def test_there_are_as_many_as_were_tried() -> None:
    assert len(NAMES) == 80 and not {"raft_large", "fasterrcnn_resnet50_fpn", "deeplabv3_resnet50"} & set(NAMES)


def test_resnet18_for_small_images_keeps_their_resolution() -> None:
    model = build("resnet18", 10, (3, 32, 32))
    assert sum(parameter.numel() for parameter in model.parameters()) == 11_173_962  # as in the literature
    seen = []
    model.layer1.register_forward_hook(lambda module, inputs, output: seen.append(output.shape[-2:]))
    model(torch.zeros(2, 3, 32, 32))
    assert seen == [(32, 32)]
    large = build("resnet18", 10, (3, 224, 224))
    assert large.state_dict().keys() == vision.resnet18(num_classes=10).state_dict().keys()
    assert large.conv1.kernel_size == (7, 7)


def test_weights_follow_from_the_seed() -> None:
    states = []
    for _ in range(2):
        torch.manual_seed(3)
        states.append(build("resnet18", 10, (1, 28, 28)).state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


@pytest.mark.parametrize(
    ("name", "shape", "wanted"),
    [
        ("alexnet", (3, 32, 32), "can't take images of the shape `(3, 32, 32)`: `Given input size"),
        ("vit_b_16", (3, 20, 20), "indivisible by patch size"),
        ("convnet", (5,), "takes images, (channels, height, width), and these samples have the shape `(5,)`"),
        ("resnet50", (4, 5), "the shape `(4, 5)`. Use --model module:factory"),
        ("resnet5O", (3, 32, 32), "Did you mean resnet50?"),
        ("fasterrcnn_resnet50_fpn", (3, 224, 224), "none of: convnet, or module:factory, or a classification model"),
    ],
)
def test_what_can_not_be(name: str, shape: tuple[int, ...], wanted: str) -> None:
    with pytest.raises(HvdDDPError) as caught:
        build(name, 10, shape)
    assert wanted in str(caught.value) and "\n" not in str(caught.value)


def test_sync_bn_without_batchnorm() -> None:
    backend = SimpleNamespace(launch=Launch(world_size=2), all_reduce=torch.clone)
    with pytest.raises(HvdDDPError, match=r"no BatchNorm layer, so nothing would change. Leave it out"):
        Backend.sync_batchnorm(backend, nn.Linear(2, 2))


def test_sync_bn_with_too_few_samples_in_the_last_step(tmp_path: Path) -> None:
    from hvd_ddp.assemble import check
    from hvd_ddp.config import TrainConfig
    from hvd_ddp.data.datasets import load

    data = load("digits")  # 1437 = 22 * 65 + 7
    check(TrainConfig(global_batch=65, sync_bn=True), data, 7)
    with pytest.raises(HvdDDPError, match=r"last step of an epoch has `7` for 8 ranks"):
        check(TrainConfig(global_batch=65, sync_bn=True), data, 8)


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("shape", [(9, 4), (5, 4, 6), (3, 4, 5, 6)], ids=len)
def test_sync_bn_on_one_rank_is_batchnorm(shape: tuple[int, ...], momentum: float | None, affine: bool) -> None:
    kind = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d}[len(shape)]
    plain, other = (kind(4, momentum=momentum, affine=affine, dtype=torch.float64) for _ in range(2))
    ours = synchronized(nn.Sequential(other), torch.clone)[0]
    assert isinstance(ours, SyncBatchNorm) and list(ours.state_dict()) == list(plain.state_dict())
    if affine:
        for norm in (plain, ours):
            nn.init.constant_(norm.weight, 1.7)
            nn.init.constant_(norm.bias, 0.3)
    for number in range(3):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(number), dtype=torch.float64) + 100
        results = []
        for norm in (plain, ours):
            mine = x.clone().requires_grad_()
            out = norm(mine)
            (out * torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(shape)).sum().backward()
            results.append([out, mine.grad, *(p.grad for p in norm.parameters()), *norm.buffers()])
        for one, two in zip(*results, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(plain.eval()(x), ours.eval()(x))
    with pytest.raises(ValueError, match="expected"):
        ours(torch.zeros(4))


@pytest.mark.parametrize("size", [(8, 8), (8, 16), (32, 24), (28, 28), (4, 8), (9, 8)])
@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last])
def test_our_pooling_is_torchs_bit_for_bit(size: tuple[int, int], form: torch.memory_format) -> None:
    seen = []
    for pool in (Pool(8), nn.AdaptiveAvgPool2d(8)):
        torch.manual_seed(0)
        images = torch.randn(3, 5, *size).to(memory_format=form).requires_grad_()
        pooled = pool(images)
        (pooled * torch.randn(3, 5, 8, 8)).sum().backward()
        seen.append((pooled, images.grad))
    (ours, our_gradient), (theirs, their_gradient) = seen
    assert torch.equal(ours, theirs) and torch.equal(our_gradient, their_gradient)
