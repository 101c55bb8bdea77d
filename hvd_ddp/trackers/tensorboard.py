"""TensorBoard: event files in `tensorboard` of the run directory, for `tensorboard --logdir`."""

from __future__ import annotations

import yaml
from torch.utils.tensorboard import SummaryWriter

from hvd_ddp.trackers import About


class Tracker:
    """Curves that go on where a run is resumed: what came after its checkpoint is taken back."""

    def __init__(self, about: About) -> None:
        self._writer = SummaryWriter(about.directory / "tensorboard", purge_step=about.step + 1)
        lines = yaml.safe_dump(about.config, sort_keys=False, allow_unicode=True).splitlines()
        self._writer.add_text("config", "\n".join(f"    {line}" for line in lines), about.step)
        self._writer.flush()

    def row(self, kind: str, step: int, values: dict[str, float]) -> None:
        """A scalar each, such as train/loss and train/phases/forward."""
        for name, value in values.items():
            self._writer.add_scalar(f"{kind}/{name}", value, step)
        self._writer.flush()

    def close(self, status: str) -> None:
        """All is on the disk."""
        self._writer.close()
