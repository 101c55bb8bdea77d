"""hvd_ddp's trainer, as `train` runs it."""

import contextlib
import io

from hvd_ddp.backends import connect
from hvd_ddp.commands.peers import Job
from hvd_ddp.config import TransportName
from hvd_ddp.job.health import ends_together
from hvd_ddp.trainer import Trainer


def train(job: Job, transport: TransportName = "gloo") -> None:
    backend = connect("ddp", transport, "cpu", threads=1, directory=job.folder)
    with ends_together(backend.meeting, timeout=job.config.timeout), backend, contextlib.redirect_stdout(io.StringIO()):
        Trainer(job.config, job.model, job.optimizer, job.data, backend).fit()
