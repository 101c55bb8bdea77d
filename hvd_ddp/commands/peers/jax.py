"""JAX: docs.jax.dev/en/latest/multi_process.html and distributed_data_loading.html, a process a rank, with optax."""

from __future__ import annotations

from typing import Any

import jax
import optax
from jax import numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from hvd_ddp.commands.bench_turn import WARM_UP
from hvd_ddp.commands.peers import Job
from hvd_ddp.commands.peers.convnet import averages, put_back, weights
from hvd_ddp.models import SIDE


def train(job: Job) -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    launch = job.launch
    jax.distributed.initialize(f"127.0.0.1:{job.ports[0]}", launch.world_size, launch.rank)
    mesh = Mesh(jax.devices(), ("ranks",))
    everywhere, split = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("ranks"))
    optimizer = optax.sgd(job.config.lr, momentum=job.config.momentum)

    def step(state: Any, inputs: Any, targets: Any) -> Any:
        parameters, momenta = state
        gradients = jax.grad(_loss)(parameters, inputs, targets)
        updates, momenta = optimizer.update(gradients, momenta, parameters)
        return optax.apply_updates(parameters, updates), momenta

    parameters = jax.device_put([jnp.asarray(array) for array in weights(job.model)], everywhere)
    state = (parameters, jax.jit(optimizer.init, out_shardings=everywhere)(parameters))
    compiled = jax.jit(step, donate_argnums=0, out_shardings=everywhere)
    inputs, targets = job.inputs.permute(0, 2, 3, 1).contiguous().numpy(), job.targets.numpy()
    for number, rows in enumerate(job.rows):
        if number in (WARM_UP, len(job.rows) - 1):
            jax.block_until_ready(state)  # it runs ahead; the time is taken from the one step to the other
        job.clock.tick()
        batch = [jax.make_array_from_process_local_data(split, array[rows.numpy()]) for array in (inputs, targets)]
        state = compiled(state, *batch)
    put_back(job.model, [jax.device_get(array) for array in state[0]])
    jax.distributed.shutdown()


def _loss(parameters: Any, inputs: Any, targets: Any) -> Any:
    kernels, biases = parameters[::2], parameters[1::2]
    for kernel, bias in zip(kernels[:2], biases[:2], strict=True):
        inputs = jax.lax.conv_general_dilated(
            inputs, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        inputs = jax.nn.relu(inputs + bias)
    if inputs.shape[1:3] != (SIDE, SIDE):
        rows, columns = (averages(side) for side in inputs.shape[1:3])
        inputs = jnp.einsum("ih,jw,nhwc->nijc", rows, columns, inputs)
    inputs = jax.nn.relu(inputs.reshape(len(inputs), -1) @ kernels[2] + biases[2])
    return optax.softmax_cross_entropy_with_integer_labels(inputs @ kernels[3] + biases[3], targets).mean()
