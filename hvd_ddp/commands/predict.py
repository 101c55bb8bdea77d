"""predict: what a checkpoint says of each sample of a data set, in order, as CSV."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hvd_ddp.commands.trained import Choice, Trained, on_ranks, trained
from hvd_ddp.errors import HvdDDPError

if TYPE_CHECKING:
    from hvd_ddp.backends.base import Backend

COLUMNS = ("sample", "target", "prediction", "probability")


@dataclass(frozen=True)
class Options(Choice):
    """Write what a checkpoint says of the evaluation part of a data set: a line a sample, each once, in its order,
    whatever the number of ranks. Columns: the sample's number, its class, the predicted class, and its probability.
    """

    output: Path = Path("predictions.csv")
    """File to write; one that is there stays as it is, and is an error."""


def run(arguments: list[str]) -> int:
    """`python -m hvd_ddp predict`."""
    return on_ranks("predict", Options, arguments, _predict)


def _predict(options: Options, backend: Backend) -> None:
    from hvd_ddp.durable import replace_file

    output = options.output
    backend.on_main(lambda: _refuse(output))
    with trained(options, backend, skip_bad=False) as it:  # a sample that is left out would shift all numbers
        mine = backend.together(lambda: _lines(it, backend))
    parts = [backend.broadcast_bytes(mine, src) for src in range(backend.launch.world_size)]
    rows = [row for part in parts for row in csv.reader(io.StringIO(part.decode()))]

    def write() -> None:
        _refuse(output)
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows([number, *row] for number, row in enumerate(rows))
        try:
            replace_file(output, text.getvalue().encode())
        except OSError as error:
            raise HvdDDPError(f"`{output}` can't be written: {error.strerror}. Choose another --output.") from error

    backend.on_main(write)
    if backend.is_main:
        right = sum(target == prediction for target, prediction, _ in rows)
        print(f"{output}: {len(rows)} samples, {right} as their target says", flush=True)


def _refuse(output: Path) -> None:
    """Raise HvdDDPError where the file is there already, or can't be made."""
    if output.exists() or output.is_symlink():
        raise HvdDDPError(f"`{output}` is there already, and is left as it is. Move it, or give another --output.")
    if not output.absolute().parent.is_dir():
        raise HvdDDPError(f"`{output.parent}` is no folder. Make it, or give another --output.")


def _lines(it: Trained, backend: Backend) -> bytes:
    """This rank's lines without their numbers: its share of the set is one piece of it, in order."""
    import torch

    from hvd_ddp.data.items import Stream

    if isinstance(it.data.eval, Stream):
        raise HvdDDPError("The data set is a stream, whose samples have no numbers. Give one with `__len__`.")
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    it.model.eval()
    with torch.no_grad():
        for batch in it.feed.evaluation_batches():
            backend.meeting.pulse.at("predicting")
            with it.numbers.autocast():
                outputs = it.model(batch.inputs)
            if outputs.ndim != 2:
                raise HvdDDPError(
                    f"The model gives `{tuple(outputs.shape)}` for {len(batch.targets)} samples, not a number for each "
                    "class: predict is for classification."
                )
            probabilities, classes = outputs.double().softmax(1).max(1)
            for row in zip(batch.targets.tolist(), classes.tolist(), probabilities.tolist(), strict=True):
                writer.writerow([row[0], row[1], f"{row[2]:.6f}"])
    backend.meeting.pulse.at("meeting the others")
    return text.getvalue().encode()
