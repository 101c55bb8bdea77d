"""What every rank of the contract test runs: the backend's interface, then each case. Results go to files."""

import argparse
import json
import time
from pathlib import Path

import torch
from cases import CASES, MODELS, NUM_CLASSES, STEPS, arrays

from hvd_ddp import TrainConfig, Trainer, connect
from hvd_ddp.backends.base import Backend
from hvd_ddp.data.arrays import ArrayDataset, Data
from hvd_ddp.errors import HvdDDPError
from hvd_ddp.optim import build


def interface(backend: Backend) -> dict[str, object]:
    """Every member of Backend but the training."""
    rank, world_size = backend.launch.rank, backend.launch.world_size
    big = torch.tensor([2**53 + 1 + rank, rank, -rank])
    before = big.clone()
    sums = {op: backend.all_reduce(big, op).tolist() for op in ("sum", "max", "min")}
    untouched = torch.equal(big, before)
    scalar = backend.all_reduce(torch.tensor(float(rank), dtype=torch.float64))
    mixed = [{"a": [1, None]}, "text" * 3000, 7, [True, 1.5]][rank % 4]
    gathered = backend.all_gather_object(mixed)
    last = backend.broadcast_object({"from": rank} if rank == world_size - 1 else None, src=world_size - 1)
    blob = backend.broadcast_bytes(bytes(range(256)) * 1001 + b"x" if rank == 0 else None)
    if rank == world_size - 1:
        time.sleep(1.0)
    came = time.monotonic()
    backend.barrier()
    left = time.monotonic()
    try:
        backend.together(lambda: fail() if rank == 1 else None)
        together = "nothing raised"
    except HvdDDPError as error:
        together = str(error)
    return {
        "sums": sums, "untouched": untouched, "scalar": [scalar.item(), list(scalar.shape)], "gathered": gathered,
        "last": last, "blob": [len(blob), blob[:256] == bytes(range(256)), blob[-1:] == b"x"],
        "came": came, "left": left, "together": together, "is_main": backend.is_main, "name": backend.name,
        "transport": backend.transport,
    }  # fmt: skip


def fail() -> None:
    raise HvdDDPError("this rank can't")


def data(num_samples: int) -> Data:
    images, targets = arrays(num_samples)
    return Data.measure("contract", ArrayDataset(images, targets), ArrayDataset(images[:13], targets[:13]), NUM_CLASSES)


def trainer(name: str, backend: Backend, out: Path, **changes: object) -> Trainer:
    model_name, num_samples, options = CASES[name]
    config = TrainConfig(
        **{"global_batch": 16, "max_steps": STEPS, "run_dir": out / name, "save_every": 1000, **options, **changes}
    )
    torch.manual_seed(100 + backend.launch.rank)  # every rank starts from other weights: prepare must mend that
    model = MODELS[model_name]().to(torch.float64 if config.precision == "fp64" else torch.float32)
    if backend.is_main:
        out.mkdir(parents=True, exist_ok=True)
        torch.save(model.state_dict(), out / f"{name}.first.pt")
    return Trainer(config, model, build(config, model), data(num_samples), backend)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--transport", default="auto")
    parser.add_argument("--cases", nargs="*", default=list(CASES))
    parser.add_argument("--file", type=Path, help="JSON of further cases")
    options = parser.parse_args()
    if options.file:
        CASES.update(json.loads(options.file.read_text()))
    backend = connect(options.backend, options.transport, "cpu", threads=1, directory=options.out, timeout=60)
    with backend:
        results = {"interface": interface(backend)}
    with backend:  # again, after the teardown
        results["interface_again"] = interface(backend)
        for name in options.cases:
            trained = trainer(name, backend, options.out)
            results[name] = {
                **trained.fit(),
                "updates": trained.updates,
                "scale": trained.precision.scaler.get_scale(),
                "buffers": {key: value.tolist() for key, value in trained.model.named_buffers()},
            }
        if "sgd_momentum_decay" in options.cases:  # a stop under a moving rate, and on
            moving = {"schedule": "step", "decay_every": 1, "decay_factor": 0.7, "warmup_steps": 3}
            trainer("adamw_clip_accumulate", backend, options.out / "straight", **moving).fit()
            for steps in (7, 13, STEPS):
                trainer("adamw_clip_accumulate", backend, options.out / "stops", **moving, max_steps=steps).fit()
    results["threads"] = sorted(path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm"))
    (options.out / f"rank{backend.launch.rank}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
