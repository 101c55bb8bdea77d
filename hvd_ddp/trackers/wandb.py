"""Weights & Biases: a run for each start. Into `wandb` in the run directory, unless WANDB_MODE says otherwise."""

from __future__ import annotations

from wandb import Settings, init

from hvd_ddp.job.launch import variables
from hvd_ddp.trackers import About


class Tracker:
    """Told the options and the numbers alone: neither console, nor code, nor commit, nor what the machine does."""

    def __init__(self, about: About) -> None:
        theirs = {"WANDB_MODE": "offline", "WANDB_PROJECT": "hvd_ddp"} | variables("WANDB_MODE", "WANDB_PROJECT")
        self._run = init(
            project=theirs["WANDB_PROJECT"],
            mode=theirs["WANDB_MODE"],  # type: ignore[arg-type]  # it says which there are
            dir=about.directory,
            name=f"{about.directory.name}-{about.restart}",
            group=about.directory.name,
            config=about.config,
            settings=Settings(
                silent=True,
                console="off",
                save_code=False,
                disable_git=True,
                disable_code=True,
                x_disable_meta=True,
                x_disable_stats=True,
                x_disable_machine_info=True,
                x_save_requirements=False,
            ),
        )
        self._run.define_metric("*", step_metric="step")

    def row(self, kind: str, step: int, values: dict[str, float]) -> None:
        """A metric each, such as train/loss and train/phases/forward, against `step`."""
        self._run.log({"step": step, **{f"{kind}/{name}": value for name, value in values.items()}})

    def close(self, status: str) -> None:
        """Tell how it ended."""
        self._run.finish(exit_code=1 if status == "failed" else 0)
