"""MLflow: a run for each start. Into `mlflow` in the run directory, unless MLFLOW_TRACKING_URI says where."""

from __future__ import annotations

import time

from mlflow import MlflowClient
from mlflow.entities import Metric, Param

from hvd_ddp.job.launch import variables
from hvd_ddp.trackers import About

STATUS = {"finished": "FINISHED", "preempted": "KILLED", "failed": "FAILED"}


class Tracker:
    """By its client, which tells nothing of its own accord: neither user, nor program, nor commit."""

    def __init__(self, about: About) -> None:
        theirs = variables("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME")
        local = (about.directory / "mlflow").absolute().as_uri()
        self._client = MlflowClient(theirs.get("MLFLOW_TRACKING_URI", local))
        name = theirs.get("MLFLOW_EXPERIMENT_NAME", "hvd_ddp")
        experiment = self._client.get_experiment_by_name(name)
        number = self._client.create_experiment(name) if experiment is None else experiment.experiment_id
        run = self._client.create_run(number, run_name=f"{about.directory.name}-{about.restart}")
        self._run: str = run.info.run_id
        params = [Param(name, str(value)) for name, value in about.config.items()]
        self._client.log_batch(self._run, params=params)

    def row(self, kind: str, step: int, values: dict[str, float]) -> None:
        """A metric each, such as train/loss and train/phases/forward."""
        now = int(time.time() * 1000)
        self._client.log_batch(
            self._run, [Metric(f"{kind}/{name}", value, now, step) for name, value in values.items()]
        )

    def close(self, status: str) -> None:
        """Tell how it ended."""
        self._client.set_terminated(self._run, STATUS[status])
