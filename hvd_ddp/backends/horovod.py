"""Horovod, over MPI where the job runs under the MPI that it was built with, else over Gloo."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hvd_ddp.backends import mpi
from hvd_ddp.backends.base import Backend, Op
from hvd_ddp.backends.buckets import SIZE, Buckets
from hvd_ddp.backends.gradients import AllUsed, FindUnused
from hvd_ddp.backends.horovod_gloo import GlooServer
from hvd_ddp.config import Communication
from hvd_ddp.errors import HvdDDPError
from hvd_ddp.horovod_build.record import check_build
from hvd_ddp.job.launch import Launch, export, variables
from hvd_ddp.layout import as_it_lies

REMEDY = "Run `python -m hvd_ddp install-horovod`, or use --backend ddp."


class HorovodBackend(Backend):
    """Gradients are averaged in buckets while backward still runs, by Horovod's own thread.

    Not by its DistributedOptimizer: that hands over each tensor by itself, which Horovod copies together and back again
    in every step, and scales in a pass of its own.
    """

    name = "horovod"
    changes_transport = False  # aborts in its C++ side when it is initialised over MPI after Gloo
    _setups = _prepared = 0
    _server: GlooServer | None = None

    @classmethod
    def choose_transport(cls, transport: str, launch: Launch, device: torch.device) -> str:
        hvd = import_horovod()
        if transport == "auto":
            if device.type == "cuda" and hvd.nccl_built():
                return "nccl"
            return "mpi" if hvd.mpi_built() and mpi.started_by_ours(launch) else "gloo"
        built = {"mpi": hvd.mpi_built(), "gloo": hvd.gloo_built(), "nccl": bool(hvd.nccl_built())}
        if not built[transport]:
            there = ", ".join(name for name, yes in built.items() if yes)
            raise HvdDDPError(
                f"--transport {transport} is not in this Horovod, which was built with: {there}. "
                f"Use one of these, or build it again where `{transport}` is found: python -m hvd_ddp install-horovod."
            )
        return transport

    @classmethod
    def check(cls, communication: Communication, transport: str, launch: Launch, device: torch.device) -> None:
        without = {
            "bf16": "Horovod sums no bfloat16",
            "powersgd": "PowerSGD is a hook of torch's DDP, Horovod has none",
        }
        if (reason := without.get(communication.compression)) is not None:
            raise HvdDDPError(
                f"--compression {communication.compression}: {reason}. Use --compression fp16, or --backend ddp."
            )
        if communication.bucket_mb is not None:
            raise HvdDDPError("--bucket-mb is of DDP's buckets, and this job runs under Horovod. Use --fusion-mb.")
        if communication.adasum:
            _check_adasum(communication, transport, launch.world_size)
        for name, value in _settings(communication).items():
            users = variables(name).get(name)
            if users not in (None, "", value):
                raise HvdDDPError(
                    f"{name} is `{users}` in the environment, and the options of this run say `{value}`: only one can "
                    f"hold. Unset {name}, or leave the option out."
                )

    def setup(self) -> None:
        hvd = import_horovod()
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        if self.transport == "mpi" or (
            self.transport == "nccl" and hvd.mpi_built() and mpi.started_by_ours(self.launch)
        ):
            export({"HOROVOD_CONTROLLER": "mpi", "HOROVOD_CPU_OPERATIONS": "mpi"})
            mpi.start()  # else a second init after Horovod's shutdown aborts the job
        else:
            self._meet_over_gloo()
        export(_settings(self.communication))
        hvd.init()
        if (hvd.rank(), hvd.size()) != (self.launch.rank, self.launch.world_size):
            raise HvdDDPError(
                f"Horovod says rank `{hvd.rank()}` of `{hvd.size()}`, but {self.launch.launcher} started this as rank "
                f"`{self.launch.rank}` of `{self.launch.world_size}`: every process would train alone. Horovod's MPI "
                f"is not the one of the launcher. Use --transport gloo, or put {self.launch.launcher}'s MPI on PATH "
                "and run `python -m hvd_ddp install-horovod`."
            )
        self._hvd = hvd

    def _meet_over_gloo(self) -> None:
        """Hand Horovod what its C++ side reads from the environment alone, by way of our store."""
        HorovodBackend._setups += 1
        key = f"horovod/{HorovodBackend._setups}"
        if self.is_main:
            if HorovodBackend._server is not None:
                HorovodBackend._server.stop()
            HorovodBackend._server = GlooServer(self.meeting.address)
            self.meeting.store.set(key, f"{self.meeting.address}:{HorovodBackend._server.port}")
        address, port = self.meeting.store.get(key).decode().rsplit(":", 1)
        launch, hosts = self.launch, self.launch.hosts or ()
        # Horovod's cross communicator joins the ranks that have the same local rank, one a node.
        local_ranks = [hosts[:rank].count(host) for rank, host in enumerate(hosts)]
        mine = local_ranks[launch.rank]
        across = [rank for rank, local_rank in enumerate(local_ranks) if local_rank == mine]
        export({
            "HOROVOD_RANK": str(launch.rank),
            "HOROVOD_SIZE": str(launch.world_size),
            "HOROVOD_LOCAL_RANK": str(mine),
            "HOROVOD_LOCAL_SIZE": str(launch.local_world_size),
            "HOROVOD_CROSS_RANK": str(across.index(launch.rank)),
            "HOROVOD_CROSS_SIZE": str(len(across)),
            "HOROVOD_HOSTNAME": hosts[launch.rank],
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": address,
            "HOROVOD_GLOO_RENDEZVOUS_PORT": port,
            "HOROVOD_GLOO_IFACE": self.meeting.interface,
            "HOROVOD_GLOO_TIMEOUT_SECONDS": str(max(1, int(self.timeout))),
            "HOROVOD_CONTROLLER": "gloo",
            "HOROVOD_CPU_OPERATIONS": "gloo",
        })  # fmt: skip

    def lost_a_peer(self, error: BaseException) -> bool:
        return type(error).__name__ == "HorovodInternalError"

    def teardown(self) -> None:
        self._hvd.shutdown()

    def prepare(
        self, model: nn.Module, optimizer: Optimizer, *, accumulate: int = 1, find_unused_parameters: bool = False
    ) -> tuple[nn.Module, Optimizer]:
        hvd = self._hvd
        self._gradients = (
            FindUnused(model, all_reduce=self.all_reduce, complete=True)  # type: ignore[arg-type]
            if find_unused_parameters
            else AllUsed(model)
        )
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        hvd.broadcast_parameters({name: as_it_lies(tensor.detach()) for name, tensor in tensors.items()}, root_rank=0)
        # No broadcast_optimizer_state: on a fresh optimizer it takes a step with zero gradients, so that weight decay
        # moves the weights. A fresh optimizer has no state; what a checkpoint brings is loaded after this.
        told = self.communication
        most = SIZE if told.fusion_mb is None else told.fusion_mb
        HorovodBackend._prepared += 1  # two models may be under way at once, and Horovod tells tensors by their names
        self._buckets = buckets = Buckets(
            model,
            lambda tensor, name: hvd.allreduce_async_(tensor, op=hvd.Adasum if told.adasum else hvd.Sum, name=name),
            hvd.synchronize,
            name=f"hvd_ddp.gradients.{HorovodBackend._prepared}",
            scale=1.0 if told.adasum else 1.0 / self.launch.world_size,  # before the sum, which overflows no earlier
            mebibytes=0.0 if told.adasum else most,  # Adasum combines layer by layer
            dtype=torch.float16 if told.compression == "fp16" else None,
        )
        optimizer.register_step_pre_hook(lambda *_: buckets.finish() if buckets.begun else None)
        return model, optimizer

    @contextmanager
    def no_sync(self, wrapped: nn.Module) -> Iterator[None]:
        self._buckets.paused = True
        try:
            yield
        finally:
            self._buckets.paused = False

    @contextmanager
    def synchronize(self, optimizer: Optimizer) -> Iterator[None]:
        self._gradients.before()
        self._buckets.finish()
        self._gradients.after()
        yield

    def all_reduce(self, tensor: Tensor, op: Op = "sum") -> Tensor:
        hvd = self._hvd
        ops = {"sum": hvd.Sum, "max": hvd.Max, "min": hvd.Min}
        result: Tensor = hvd.allreduce(tensor.detach(), op=ops[op], name=f"hvd_ddp.{op}")
        return result

    def all_reduce_(self, tensor: Tensor) -> None:
        self._hvd.allreduce_(tensor, op=self._hvd.Sum, name="hvd_ddp.in_place")


def _settings(communication: Communication) -> dict[str, str]:
    """What Horovod reads of it at its start, from the environment."""
    settings = {}
    if communication.fusion_mb is not None:
        settings["HOROVOD_FUSION_THRESHOLD"] = str(int(communication.fusion_mb * (1 << 20)))
    if communication.cycle_ms is not None:
        settings["HOROVOD_CYCLE_TIME"] = f"{communication.cycle_ms:g}"
    if communication.autotune:
        settings["HOROVOD_AUTOTUNE"] = "1"
    return settings


def _check_adasum(communication: Communication, transport: str, world_size: int) -> None:
    if transport != "mpi":
        raise HvdDDPError(
            f"--adasum: Horovod does it over MPI alone, and gradients travel over `{transport}`. Start with mpirun, "
            "horovodrun or `srun --mpi=pmix` and --transport mpi."
        )
    if world_size & (world_size - 1):
        raise HvdDDPError(f"--adasum joins ranks in pairs, and there are `{world_size}`. Start 2, 4, 8, ... ranks.")
    if communication.compression == "fp16" and platform.machine() != "x86_64":
        raise HvdDDPError(
            f"--adasum: Horovod does it in 16 bits on x86_64 alone, and this is `{platform.machine()}`. Leave out "
            "--compression or --adasum."
        )


def import_horovod() -> Any:
    """horovod.torch, or HvdDDPError that says why it is not to be had."""
    check_build(torch.__version__)
    try:
        import horovod.torch as hvd
    except ModuleNotFoundError as error:
        if error.name not in ("horovod", "horovod.torch"):
            raise HvdDDPError(f"Horovod is here, but not its `{error.name}`. {REMEDY}") from error
        raise HvdDDPError(f"--backend horovod: Horovod is not installed in this Python. {REMEDY}") from error
    except Exception as error:  # Horovod raises whatever its loader met
        raise HvdDDPError(f"Horovod does not load with torch `{torch.__version__}`: {error}. {REMEDY}") from error
    return hvd
