"""predict: what a checkpoint says of each sample of a data set, in order, as CSV."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvd_ddp.commands.trained import Choice, Trained, on_ranks, trained
from hvd_ddp.errors import HvdDDPError

if TYPE_CHECKING:
    from hvd_ddp.backends.base import Backend


@dataclass(frozen=True)
class Options(Choice):
    """Write what a checkpoint says of the evaluation part of a data set: a line a sample, each once, in its order,
    whatever the number of ranks. Columns: the sample's number, its class, the predicted class, and its probability; of
    a --task of your own what its predict(model, batch) returns, or else the loss.
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
    lines = [list(csv.reader(io.StringIO(part.decode()))) for part in parts if part]  # a rank may have had no sample
    columns, rows = lines[0][0], [row for part in lines for row in part[1:]]

    def write() -> None:
        _refuse(output)
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["sample", *columns])
        writer.writerows([number, *row] for number, row in enumerate(rows))
        try:
            replace_file(output, text.getvalue().encode())
        except OSError as error:
            raise HvdDDPError(f"`{output}` can't be written: {error.strerror}. Choose another --output.") from error

    backend.on_main(write)
    if backend.is_main:
        told = ""
        if {"target", "prediction"} <= set(columns):
            pair = columns.index("target"), columns.index("prediction")
            told = f", {sum(row[pair[0]] == row[pair[1]] for row in rows)} as their target says"
        print(f"{output}: {len(rows)} samples{told}", flush=True)


def _refuse(output: Path) -> None:
    """Raise HvdDDPError where the file is there already, or can't be made."""
    if output.exists() or output.is_symlink():
        raise HvdDDPError(f"`{output}` is there already, and is left as it is. Move it, or give another --output.")
    if not output.absolute().parent.is_dir():
        raise HvdDDPError(f"`{output.parent}` is no folder. Make it, or give another --output.")


def _lines(it: Trained, backend: Backend) -> bytes:
    """The names of the columns and this rank's lines, without numbers: its share is one piece of the set, in order.

    Empty where it has no sample.
    """
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
                columns = it.task.predict(it.model, batch)
            if not text.tell():
                writer.writerow(columns)
            values = [column if isinstance(column, list) else column.tolist() for column in columns.values()]
            writer.writerows([_cell(value) for value in row] for row in zip(*values, strict=True))
    backend.meeting.pulse.at("meeting the others")
    return text.getvalue().encode()


def _cell(value: Any) -> Any:
    return f"{value:.6f}" if isinstance(value, float) else value
