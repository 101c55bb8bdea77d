"""A second of all_reduce under one backend: `python -m hvd_ddp.doctor.reduce BACKEND FOLDER SECONDS [RANKS]`.

On every rank of the job; or alone, and then it starts so many ranks on this machine. A process of its own, so that a
library which crashes, hangs or kills its process takes nothing else with it.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hvd_ddp.backends import BACKENDS
from hvd_ddp.doctor.check import Check, Patient, failure, ok, warning
from hvd_ddp.doctor.gathering import Answers, Gathering
from hvd_ddp.doctor.probe import MARK, NoAnswerError, ask_python
from hvd_ddp.doctor.report import Report, ranks_in_words
from hvd_ddp.errors import HvdDDPError
from hvd_ddp.job.spawn import spawn

SHOWN = 3  # reasons that are told
SIZE = 1 << 20  # numbers of four bytes
LONGEST = 1.0  # seconds


def main(name: Any, folder: str, seconds: str) -> None:
    """Print what came out, on rank 0; raises where it fails."""
    import torch

    from hvd_ddp.backends import connect

    backend = connect(name, directory=Path(folder), start_timeout=float(seconds), timeout=float(seconds))
    with backend:
        size, rank = backend.launch.world_size, backend.launch.rank
        tensor = torch.full((SIZE,), float(rank + 1), device=backend.device)
        right = bool((backend.all_reduce(tensor) == size * (size + 1) / 2).all())
        began = time.perf_counter()
        backend.all_reduce(tensor)
        took = torch.tensor([time.perf_counter() - began], dtype=torch.float64, device=backend.device)
        count = max(1, int(LONGEST / float(backend.all_reduce(took, "max"))))
        began = time.perf_counter()
        for _ in range(count):
            tensor_sum = backend.all_reduce(tensor)
        right = right and float(tensor_sum[0]) == size * (size + 1) / 2
        answer = {
            "right": right,
            "ranks": size,
            "transport": backend.transport,
            "device": str(backend.device),
            "seconds": (time.perf_counter() - began) / count,
        }
    sys.stdout.write(f"\n{MARK}{json.dumps(answer)}\n")


def all_reduce(
    gathering: Gathering,
    patient: Patient,
    answers: Answers,
    reports: dict[int, Report],
    *,
    in_the_way: list[str],
) -> Iterator[Check]:
    """On rank 0: under each backend that every rank can load; not where a failure would only make it wait."""
    if in_the_way:
        yield warning("all_reduce", f"not tried, because of {', '.join(in_the_way)}", "Mend the failures first.")
        return
    for name in BACKENDS:
        if name == "local" or not all(name in report.facts.get("backends", []) for report in reports.values()):
            continue
        patient.facts["trying"] = f"all_reduce {name}"
        told = gathering.ask("reduce", name, list(reports), answers, 3 * patient.seconds)
        yield _judge(name, {rank: told.get(rank, {"error": "no answer"}) for rank in reports})


def answer(name: str, patient: Patient) -> dict[str, Any]:
    """On every rank: run it, and say what came out or why nothing did."""
    alone = ["2"] if patient.launch.world_size == 1 else []
    arguments = ["-m", "hvd_ddp.doctor.reduce", name, str(patient.run_dir), str(patient.seconds), *alone]
    try:
        result: dict[str, Any] = ask_python(arguments, 2 * patient.seconds)
    except NoAnswerError as error:
        return {"error": str(error)}
    return result


def _judge(name: str, told: dict[int, dict[str, Any]]) -> Check:
    check = f"all_reduce {name}"
    reasons: dict[str, list[int]] = {}
    for rank, result in told.items():
        if "error" in result or not result["right"]:
            reasons.setdefault(result.get("error", "the sum is wrong"), []).append(rank)
    if reasons:
        words = [f"{ranks_in_words(ranks)}: {reason}" for reason, ranks in reasons.items()]
        remedy = "Mend what stands above first; then see this backend alone: python -m hvd_ddp --backend " + name
        return failure(check, "; ".join(words[:SHOWN]), f"{remedy} --max-steps 2.")
    one = told[0]
    speed = 4 * SIZE / one["seconds"] / 1e9
    return ok(
        check,
        f"{one['ranks']} ranks over {one['transport']} on {one['device']}: 4 MiB in {one['seconds'] * 1000:.1f} ms, "
        f"{speed:.2f} GB/s, the sum is right",
    )


if __name__ == "__main__":
    try:
        if len(sys.argv) > 4:
            sys.exit(spawn(int(sys.argv[4]), sys.argv[1:4], module="hvd_ddp.doctor.reduce"))
        main(*sys.argv[1:])
    except HvdDDPError as error:
        sys.exit(str(error))
