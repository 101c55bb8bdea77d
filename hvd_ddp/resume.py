"""What a start does to what the run directory holds. Reads only."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvd_ddp import checkpoint
from hvd_ddp.backends.base import Backend
from hvd_ddp.config import TrainConfig, may_change
from hvd_ddp.decisions import Decisions
from hvd_ddp.errors import HvdDDPError
from hvd_ddp.job.launch import Launch
from hvd_ddp.lock import read_json
from hvd_ddp.optim import depends_on_length
from hvd_ddp.outside import from_yaml, read
from hvd_ddp.state import check_state, is_config

MOST_RESTARTS = 1 << 31  # more are none: somebody has edited the summary
LONGEST = 300  # characters that an error quotes of a file
LOOKS, LOOK_AGAIN = 18, 2.0  # seconds; NFS remembers a directory for 30 s


@dataclass(frozen=True)
class Start:
    """What this start does to the run directory; the same on every rank."""

    directory: str
    restart: int = 0
    checkpoint: str | None = None  # where to go on from; None: step 0
    finished: bool = False  # nothing is left to do
    passed_over: tuple[str, ...] = ()  # what was wrong with newer checkpoints


def default_directory(config: TrainConfig, launch: Launch) -> Path:
    """--run-dir; else a name that a requeued job finds again; else one of the time."""
    if config.run_dir is not None:
        return config.run_dir
    if launch.scheduler_job is not None:
        return Path("runs") / f"job-{launch.scheduler_job.replace('/', '-')}"
    names = f"{config.data}-{config.model}".replace(":", "-").replace("/", "-")
    return Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{names}"


def has_checkpoints(config: TrainConfig, launch: Launch) -> bool:
    """Whether this start goes on from a checkpoint, if it goes on at all."""
    own = _seen(default_directory(config, launch))
    return bool(own) or config.resume not in ("auto", "never")


def same_directory(directory: Path, backend: Backend) -> None:
    """Refuse to start where another rank sees checkpoints that rank 0 does not: it would begin again at step 0.

    Network file systems may show what was there half a minute ago: so long is waited for rank 0 to see them as well.
    """
    hosts = backend.launch.hosts or ()
    for _ in range(LOOKS):
        found = _seen(directory)
        newest: list[str] = backend.all_gather_object(found[0].name if found else "")
        if newest[0] == max(newest):
            return
        time.sleep(LOOK_AGAIN)
    rank = newest.index(max(newest))
    raise HvdDDPError(
        f"Rank {rank} on {hosts[rank]} sees `{newest[rank]}` in `{directory}`, rank 0 on {hosts[0]} sees "
        f"{f'nothing later than `{newest[0]}`' if newest[0] else 'no checkpoint'}: they look at different directories "
        "of that name. Mount the same file system on each host, or choose another --run-dir."
    )


def _seen(directory: Path) -> list[Path]:
    try:
        return checkpoint.found(directory / "checkpoints")
    except OSError:  # rank 0 says what is wrong with it
        return []


def plan(config: TrainConfig, directory: Path, *, total_steps: int, num_samples: int | None) -> tuple[Start, bytes]:
    """Decide by the table "the life of a run"; reads only. The bytes are those of the checkpoint to go on from.

    Raises HvdDDPError where the directory holds a run that this configuration can't go on with.
    """
    summary = read_json(directory / "summary.json")
    before = summary.get("restart")
    restart = before + 1 if isinstance(before, int) and 0 <= before < MOST_RESTARTS else 0
    existing = checkpoint.found(directory / "checkpoints")
    started = bool(existing or summary or (directory / "config.yaml").exists())
    if config.resume == "never" and started:
        raise HvdDDPError(f"`{directory}` holds a run already, and --resume is `never`. Choose another --run-dir.")
    if config.resume not in ("auto", "never"):
        start, data = _from_file(config, directory, existing=existing, restart=restart)
        _may_go_on(
            config,
            checkpoint.parse(data, config.resume),
            origin=config.resume,
            total_steps=total_steps,
            num_samples=num_samples,
        )
        return start, data
    path, data, passed_over = checkpoint.newest_whole(directory / "checkpoints")
    if path is None:
        if existing:
            raise HvdDDPError(
                f"`{directory}` has {len(existing)} checkpoint(s), and none is whole: {' '.join(passed_over)} Starting "
                "at step 0 would lose what they may still hold. Restore one, or choose another --run-dir."
            )
        if started:
            _same_run(config, _read_yaml(directory / "config.yaml"), str(directory))
        return Start(str(directory), restart), b""
    state = checkpoint.parse(data, str(path))
    _may_go_on(config, state, origin=str(path), total_steps=total_steps, num_samples=num_samples)
    ended = state["progress"]["step"] == total_steps or Decisions(**state.get("decisions", {})).end(config)
    finished = summary.get("status") == "finished" and ended
    return Start(str(directory), restart, str(path), finished, tuple(passed_over)), data


def _from_file(config: TrainConfig, directory: Path, *, existing: list[Path], restart: int) -> tuple[Start, bytes]:
    if existing:
        raise HvdDDPError(
            f"--resume is `{config.resume}`, but `{directory}` has checkpoints of its own ({existing[0].name}). "
            "Leave --resume out to go on from those, or choose another --run-dir."
        )
    path = Path(config.resume)
    if not path.is_file():
        raise HvdDDPError(
            f"--resume is `{config.resume}`, and there is no such file. Give auto, never or a checkpoint."
        )
    data = checkpoint.verified(path)
    return Start(str(directory), restart, str(path)), data


def _may_go_on(
    config: TrainConfig, state: dict[str, Any], *, origin: str, total_steps: int, num_samples: int | None
) -> None:
    if not {"model", "optimizer", "progress", "config", "total_steps", "data"} <= state.keys():
        raise HvdDDPError(f"`{origin}` is no checkpoint of a run. To take its weights alone, use --init.")
    check_state(state, origin)
    _same_run(config, state["config"], f"Checkpoint `{origin}`")
    if state["data"]["num_samples"] != num_samples:
        raise HvdDDPError(
            f"Checkpoint `{origin}` was written with `{state['data']['num_samples']}` training samples, here are "
            f"`{num_samples}`: the data order would change. Use the same files, or another --run-dir."
        )
    step = state["progress"]["step"]
    if total_steps < step:
        raise HvdDDPError(
            f"Checkpoint `{origin}` is at step {step}, and this run would end at step {total_steps}. "
            "Give more --epochs or --max-steps, or another --run-dir."
        )
    if total_steps != state["total_steps"] and depends_on_length(config):
        raise HvdDDPError(
            f"Checkpoint `{origin}` was written on the way to step {state['total_steps']}, this run ends at step "
            f"{total_steps}: with --schedule {config.schedule} the rates used so far would have been others. Keep the "
            "length, or start anew with --init and another --run-dir."
        )


def _same_run(config: TrainConfig, saved: dict[str, Any], origin: str) -> None:
    for name, value in config.to_dict().items():
        if not may_change(name) and name in saved and saved[name] != value:
            flag, before = name.replace("_", "-"), saved[name]
            text = str(before)[:LONGEST]
            remedy = f"--{flag} {text}" if not isinstance(before, bool) else f"--{flag}" if before else f"--no-{flag}"
            raise HvdDDPError(
                f"{origin} was written with {name} `{text}`, this run has `{value}`: it would not be the same "
                f"training any more. Use {remedy}, or another --run-dir."
            )


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        value = from_yaml(read(path))
    except (OSError, ValueError):
        return {}
    return value if is_config(value) else {}  # aliases make lists that nobody lives to see printed
