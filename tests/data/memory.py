"""How much memory ranks take together: `python tests/data/memory.py DIR [SIZE]` prints it (default: 1 GB of images).

Each rank joins a job, loads the packed data and turns every image of it into batches; while all are still there, each
reads its proportional set size (PSS), in which a page that four share counts a quarter. The same with the digits shows
what an interpreter with torch costs.
"""

import json
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve()
ROOT = HERE.parents[2]


def pss() -> int:
    """Bytes, of this process, without the files of libraries: what those count depends on who else uses them."""
    total, counts = 0, True
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, value = line.partition(" ")
        if not name.endswith(":"):
            counts = "/" not in line or ".npy" in line
        elif name == "Pss:" and counts:
            total += int(value.split()[0]) * 1024
    return total


def rank(name: str, directory: Path) -> None:
    import torch

    from hvd_ddp import connect
    from hvd_ddp.assemble import load_data
    from hvd_ddp.data.loader import ArrayLoader

    with connect(device="cpu", threads=1, directory=directory) as backend:
        data = load_data(name, directory, backend)
        loader = ArrayLoader(data.train, mean=data.mean, std=data.std, device="cpu", dtype=torch.float32)
        num = sum(batch.num_samples for batch in loader.evaluation_batches(rank=0, world_size=1))
        assert num == len(data.train)
        backend.barrier()
        mine = pss()
        backend.barrier()
        all_of_them = backend.all_gather_object(mine)
        if backend.is_main:
            images = data.train.images.nbytes
            (directory / "pss.json").write_text(json.dumps({"pss": sum(all_of_them), "images": images}))


def measure(name: str, directory: Path, num_ranks: int) -> dict[str, int]:
    """Sum over ranks, and the size of the images."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(num_ranks), str(HERE), "--rank"]
    subprocess.run([*command, name, str(directory)], check=True, cwd=ROOT, timeout=500)
    found: dict[str, int] = json.loads((directory / "pss.json").read_text())
    return found


def table(directory: Path, size: int) -> dict[str, float]:
    """In MB: the images; one rank and four, with them and with the digits; what the images cost three more ranks."""
    name = f"synthetic:3x32x32:10:{size}"
    rows = {(data, ranks): measure(data, directory, ranks) for data in (name, "digits") for ranks in (1, 4)}
    sums = {key: row["pss"] / 1e6 for key, row in rows.items()}
    return {
        "images": rows[name, 1]["images"] / 1e6,
        "one rank": sums[name, 1],
        "four ranks": sums[name, 4],
        "one rank, digits": sums["digits", 1],
        "four ranks, digits": sums["digits", 4],
        "images, more": (sums[name, 4] - sums[name, 1]) - (sums["digits", 4] - sums["digits", 1]),
    }


def main() -> None:
    if sys.argv[1] == "--rank":
        rank(sys.argv[2], Path(sys.argv[3]))
    else:
        for row, value in table(Path(sys.argv[1]), int((sys.argv[2:] or ["330000"])[0])).items():
            print(f"{row:20} {value:8.0f} MB")


if __name__ == "__main__":
    main()
