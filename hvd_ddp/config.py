"""TrainConfig: every option of `train`, each default once."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

BackendName = Literal["auto", "ddp", "horovod", "local"]
TransportName = Literal["auto", "nccl", "gloo", "mpi"]
DeviceName = Literal["auto", "cpu", "cuda"]
AugmentName = Literal["none", "standard"]
OptimizerName = Literal["sgd", "adam", "adamw"]
ScheduleName = Literal["constant", "cosine", "step", "plateau"]
OnNan = Literal["stop", "skip"]
SignalName = Literal["USR1", "USR2", "HUP", "ALRM", "URG"]
Precision = Literal["fp64", "fp32", "bf16", "fp16"]
CompressionName = Literal["none", "fp16", "bf16", "powersgd"]
TrackerName = Literal["tensorboard", "mlflow", "wandb"]


def free(default: Any) -> Any:
    """A field that may change between two starts of one run; all others may not."""
    return field(default=default, metadata={"may_change": True})


@dataclass(frozen=True)
class Communication:
    """How a backend is to move gradients: options of TrainConfig, which says what each means."""

    compression: CompressionName = "none"
    adasum: bool = False
    bucket_mb: float | None = None
    fusion_mb: float | None = None
    cycle_ms: float | None = None
    autotune: bool = False

    def given(self) -> dict[str, Any]:
        """What is not as by default, by name."""
        return {f.name: value for f in dataclasses.fields(self) if (value := getattr(self, f.name)) != f.default}


PLAIN = Communication()


@dataclass(frozen=True)
class TrainConfig:
    """Options of one training run. Batch sizes and learning rates are those of the whole job, whatever its ranks."""

    # where
    backend: BackendName = free("auto")
    """How gradients move. auto: horovod under horovodrun, else ddp with several ranks, else local."""
    transport: TransportName = free("auto")
    """What carries them. auto: nccl for tensors of GPUs; mpi where MPI started the ranks; else gloo."""
    device: DeviceName = free("auto")
    """auto: cuda where there is a GPU, else cpu."""
    nproc: int | None = free(None)
    """Start this many ranks on this machine."""
    threads: Literal["auto"] | int = free("auto")
    """CPU threads a rank. auto: cores of the node over ranks of the node, under every launcher."""

    # data and model
    data: str = "digits"
    """digits, fashion_mnist, cifar10, cifar100, image_folder:SIZE, synthetic:CxHxW:CLASSES:SIZE, or module:factory with
    factory(data_dir) -> (train, eval) or (train, eval, num_classes)."""
    data_dir: Path | None = free(None)
    """Folder of the data set's files, and of its packed form."""
    stage: Path | None = free(None)
    """Folder on a disk of the node: the packed data is copied there once a node, verified, and used from there."""
    augment: AugmentName = "none"
    """Changes of the training images. standard: random crop after padding by an eighth, and flip (digits: no flip);
    of image_folder a random part in a random size, and flip."""
    skip_bad: bool = free(False)
    """Leave out samples that can't be read, such as broken pictures, and count them. Else the first ends the job."""
    workers: int | None = free(None)
    """Processes a rank that read samples ahead, where data is not in memory; 0: the rank reads. None: for image_folder
    as many as the rank has threads, up to 16; else 0."""
    model: str = "convnet"
    """convnet; resnet18 (its form for 32x32 where images have up to 64 pixels a side); any classification model of
    torchvision by name; or module:factory with factory(num_classes) -> nn.Module."""
    task: str = "classification"
    """classification; or module:Task, of which Task() has losses(model, batch) -> one a sample and
    evaluate(model, batch) -> sums over the batch, loss among them."""
    sync_bn: bool = False
    """BatchNorm over the samples of all ranks, not of each: for few samples a rank."""
    ema: float | None = None
    """Keep a moving average of the parameters with this decay (such as 0.999), evaluate and save it beside them."""
    compile: bool = free(False)
    """Let torch.compile make one program of the model; needs a compiler, and some time at the start."""
    channels_last: bool = free(False)
    """Keep pictures and the weights of convolutions with their channels last, as many kernels want them."""
    init: Path | None = None
    """Checkpoint or state dict to take the first weights from (nothing else of it)."""

    # length
    epochs: int = free(12)
    """Passes over the training set."""
    max_steps: int | None = free(None)
    """Optimizer steps, instead of epochs."""
    early_stop: int | None = free(None)
    """Finish after so many evaluations without a better one. None: train to the end."""

    # batch
    global_batch: int = 64
    """Samples an optimizer step, over all ranks."""
    accumulate: int = free(1)
    """Micro-batches that each rank cuts its share of a global batch into."""

    # optimizer
    optimizer: OptimizerName = "adam"
    """Update rule; torch's own."""
    fused: bool = free(True)
    """Update parameters in one pass over memory, where torch can: the same formulas, rounded differently."""
    lr: float = 1e-3
    """Learning rate after the warm-up."""
    momentum: float = 0.9
    """Momentum of sgd."""
    weight_decay: float = 0.0
    """Weight decay; decoupled for adamw, added to the gradient for sgd and adam."""
    schedule: ScheduleName = "constant"
    """constant; cosine: down to zero at the last step; step: times decay-factor every decay-every epochs; plateau:
    times decay-factor after --patience evaluations without a better one."""
    warmup_steps: int = 0
    """Optimizer steps over which the rate rises linearly from zero."""
    decay_every: int = 30
    """Epochs between two drops of the step schedule."""
    decay_factor: float = 0.1
    """What the step and plateau schedules multiply the rate by."""
    patience: int = 3
    """Evaluations for which the plateau schedule waits for a better one."""
    clip_norm: float | None = None
    """Largest 2-norm of the whole gradient."""
    label_smoothing: float = 0.0
    """Share of the target spread over all classes, 0 to 1; of classification."""

    # numbers
    precision: Precision = "fp32"
    """fp64 and fp32 throughout; bf16 and fp16 by autocast, parameters in fp32."""
    seed: int = 0
    """Weights, data order and dropout follow from it."""
    find_unused_parameters: bool = free(False)
    """Allow parameters that get no gradient in a step, on some ranks or on all; costs one small all_reduce a step."""

    # communication
    compression: CompressionName = "none"
    """In what form gradients travel. fp16, bf16 (DDP): in 16 bits. powersgd (DDP): two thin matrices for each large
    one; what that leaves out is added to the next gradient, but forgotten in a resume, so that the numbers differ a
    little from those of a run without a stop."""
    adasum: bool = False
    """Combine gradients by Horovod's Adasum, between sum and average as they point apart or together, instead of
    averaging. Over MPI on 2, 4, 8, ... ranks."""
    bucket_mb: float | None = free(None)
    """MiB of gradients that DDP sends at once. None: 25, the first one 1 unless it goes over MPI."""
    fusion_mb: float | None = free(None)
    """MiB of gradients that Horovod sends at once; 0: each by itself. None: 25."""
    cycle_ms: float | None = free(None)
    """Milliseconds between two looks of Horovod at which gradients are ready. None: Horovod's choice, 1."""
    autotune: bool = free(False)
    """Let Horovod try out --fusion-mb and --cycle-ms while it trains, but for one that is given."""

    # run
    run_dir: Path | None = free(None)
    """Where everything is written. None: runs/job-<id> under a scheduler, else runs/<time>-<data>-<model>."""
    resume: str = free("auto")
    """auto: go on from what the run directory holds; never; or a checkpoint file of any run."""
    save_every: int | None = free(None)
    """Steps between two checkpoints. None: one an epoch."""
    keep: int = free(3)
    """Checkpoints to keep."""
    eval_every: int = free(1)
    """Epochs between two evaluations."""
    log_every: int = free(10)
    """Steps between two lines of metrics."""
    track: tuple[TrackerName, ...] = free(())
    """Show the metrics also in these. tensorboard: files in the run directory; so does mlflow without
    MLFLOW_TRACKING_URI, and wandb without WANDB_MODE."""
    profile: bool = free(False)
    """Record ten steps of each rank: profile/<restart>/rank_0000.json, for Perfetto or Chrome's trace viewer."""

    # faults
    on_nan: OnNan = free("stop")
    """What all ranks do when a gradient is not finite on one of them: stop, or skip that step (fp16 always skips)."""
    check_replicas: int = free(100)
    """Steps between two looks whether all ranks still hold the same model; also before each save. 0: never."""
    start_timeout: float = free(300.0)
    """Seconds to wait for all ranks at the start."""
    timeout: float = free(300.0)
    """Seconds of silence, or of standing still, after which a rank counts as dead and the job ends."""
    signal: SignalName = free("USR2")
    """Signal with which the scheduler warns: save, then exit with 75. TERM does the same."""
    stop_before: float | None = free(None)
    """Save and exit with 75 this many minutes before the allocation ends, as the scheduler tells."""

    def __post_init__(self) -> None:
        """Raise ValueError for a value that can't work, whatever the data, the launcher or the machine."""
        for name in ("data_dir", "stage", "init", "run_dir"):
            if isinstance(getattr(self, name), str):  # from a program
                object.__setattr__(self, name, Path(getattr(self, name)))
        for option in dataclasses.fields(self):
            if "\0" in str(getattr(self, option.name)):
                raise ValueError(f"{_flag(option.name)} has a zero byte, which no name can have. Leave it out.")
        for name in ("epochs", "max_steps", "early_stop", "global_batch", "accumulate", "decay_every", "patience",
                     "save_every", "keep", "eval_every", "log_every", "nproc", "threads"):  # fmt: skip
            value = getattr(self, name)
            if isinstance(value, int) and value < 1:
                raise ValueError(f"{_flag(name)} is `{value}`: nothing would be done. Give a whole number from 1 up.")
        for name in ("lr", "start_timeout", "timeout"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{_flag(name)} is `{getattr(self, name)}`. Give a number above 0.")
        if self.stop_before is not None and not 0 <= self.stop_before < math.inf:
            raise ValueError(f"--stop-before is `{self.stop_before}`. Give a number of minutes from 0 up.")
        if self.check_replicas < 0:
            raise ValueError(f"--check-replicas is `{self.check_replicas}`. Give a number of steps, or 0 for never.")
        if self.workers is not None and not 0 <= self.workers <= 256:
            raise ValueError(f"--workers is `{self.workers}`. Give a whole number from 0 to 256.")
        for name in ("momentum", "weight_decay", "warmup_steps", "decay_factor"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{_flag(name)} is `{getattr(self, name)}`. Give 0 or more.")
        if not 0 <= self.seed < 2**64:
            raise ValueError(f"--seed is `{self.seed}`. Give a whole number from 0 to 2**64 - 1.")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ValueError(f"--clip-norm is `{self.clip_norm}`: every step would be zero. Give a number above 0.")
        if self.ema is not None and not 0 < self.ema < 1:
            raise ValueError(f"--ema is `{self.ema}`. Give a number between 0 and 1, such as 0.999.")
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(f"--label-smoothing is `{self.label_smoothing}`. Give a number from 0 to below 1.")
        if self.label_smoothing and self.task != "classification":
            raise ValueError(f"--label-smoothing is of classification, and --task is `{self.task}`. Leave it out.")
        for name, lowest, limit in (("bucket_mb", 1e-6, 1 << 20), ("fusion_mb", 0, 1 << 20), ("cycle_ms", 0.01, 1000)):
            value = getattr(self, name)
            if value is not None and not lowest <= value <= limit:
                raise ValueError(f"{_flag(name)} is `{value}`. Give a number from {lowest:g} to {limit}.")
        if self.backend == "local" and self.nproc is not None and self.nproc > 1:
            raise ValueError(f"--backend local is one process, --nproc is `{self.nproc}`. Use --backend ddp.")

    @property
    def communication(self) -> Communication:
        """Its part for `connect`."""
        return Communication(**{f.name: getattr(self, f.name) for f in dataclasses.fields(Communication)})

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TrainConfig:
        """From what `to_dict` gave, perhaps of another version: unknown names are left out. Raises ValueError."""
        kinds = get_type_hints(cls)
        known = {name: value for name, value in values.items() if name in kinds}
        for name, value in known.items():
            if get_origin(kinds[name]) is tuple and isinstance(value, str):
                known[name] = value = tuple(value.split())
            if not _is_one_of(value, kinds[name]):
                raise ValueError(f"{_flag(name)} is `{str(value)[:100]}`, which it can't be.")
        return cls(**known)

    def to_dict(self) -> dict[str, Any]:
        """Plain types only, several words as one text: what config.yaml and a checkpoint hold."""
        return {name: _plain(value) for name, value in dataclasses.asdict(self).items()}


# Groups of the options in --help, each from this option on.
GROUPS = {
    "where": "backend",
    "data": "data",
    "model": "model",
    "length": "epochs",
    "optimizer": "optimizer",
    "numbers": "precision",
    "communication": "compression",
    "run": "run_dir",
    "faults": "on_nan",
}


def may_change(name: str) -> bool:
    """Whether the option `name` may differ between two starts of one run."""
    return any(f.name == name and f.metadata.get("may_change", False) for f in dataclasses.fields(TrainConfig))


def _is_one_of(value: Any, kind: Any) -> bool:
    """Whether it has that type of an option: a Literal, a union, a plain type; paths are text."""
    if get_origin(kind) is Literal:
        return isinstance(value, str) and value in get_args(kind)
    if get_origin(kind) is tuple:
        return isinstance(value, tuple) and all(_is_one_of(one, get_args(kind)[0]) for one in value)
    if get_origin(kind) in (Union, UnionType):
        return any(_is_one_of(value, one) for one in get_args(kind))
    if kind in (int, float):
        return isinstance(value, int if kind is int else int | float) and not isinstance(value, bool)
    return isinstance(value, str | Path if kind is Path else kind)


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return " ".join(value)
    return str(value) if isinstance(value, Path) else value


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
