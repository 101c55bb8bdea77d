"""Evaluation: each sample once over all ranks, without padding."""

from __future__ import annotations

import torch
from torch import nn

from hvd_ddp.backends.base import Backend
from hvd_ddp.data.feed import Feed
from hvd_ddp.errors import HvdDDPError
from hvd_ddp.metrics import Sums
from hvd_ddp.precision import Precision
from hvd_ddp.tasks import Task


@torch.no_grad()
def evaluate(model: nn.Module, feed: Feed, *, task: Task, precision: Precision, backend: Backend) -> dict[str, float]:
    """Means over the set of what the task sums, and `num_samples`; the same on every rank.

    Empty, on every rank, when some rank has cut it short for an order to stop. `model` is the bare one: a wrapped one
    would wait in its forward for ranks that have no batch.
    """
    sums, names = Sums(backend.device), set[str]()
    pulse, stop = backend.meeting.pulse, backend.meeting.stop
    sums.add("cut_short", 0)
    was_training = model.training
    model.eval()
    for batch in feed.evaluation_batches():
        if stop.pending:
            sums.add("cut_short", 1)
            break
        pulse.at("evaluating")
        with precision.autocast():
            totals = task.evaluate(model, batch)
        for name, total in totals.items():
            sums.add(name, total)
        sums.add("num_samples", batch.num_samples)
        names.update(totals)
    model.train(was_training)
    pulse.at("meeting the others")
    known = backend.all_gather_object(sorted(names))  # a rank without samples does not know the names
    everywhere = sums.reduce(backend, [*sorted({name for own in known for name in own}), "num_samples", "cut_short"])
    if everywhere.pop("cut_short"):
        return {}
    num_samples = int(everywhere.pop("num_samples"))
    if not num_samples:
        raise HvdDDPError("Not one sample of the evaluation set could be read: there is no result. Mend the data.")
    return {**{name: total / num_samples for name, total in everywhere.items()}, "num_samples": num_samples}
