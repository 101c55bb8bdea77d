"""tf.distribute: tensorflow.org/tutorials/distribute/multi_worker_with_ctl, a MultiWorkerMirroredStrategy."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from hvd_ddp.commands.peers import Job
from hvd_ddp.commands.peers.convnet import averages, put_back, weights
from hvd_ddp.models import SIDE


def train(job: Job) -> None:
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    strategy = tf.distribute.MultiWorkerMirroredStrategy(
        tf.distribute.cluster_resolver.SimpleClusterResolver(
            tf.train.ClusterSpec({"worker": [f"127.0.0.1:{port}" for port in job.ports]}),
            task_type="worker", task_id=job.launch.rank, rpc_layer="grpc",
        ),
        tf.distribute.experimental.CommunicationOptions(
            implementation=tf.distribute.experimental.CommunicationImplementation.RING
        ),
    )  # fmt: skip
    inputs, targets = job.inputs.permute(0, 2, 3, 1).contiguous().numpy(), job.targets.numpy()
    with strategy.scope():
        first = weights(job.model)
        model = _convnet(inputs.shape[1:], num_classes=len(first[-1]))
        model.set_weights(first)
        optimizer = tf.keras.optimizers.SGD(job.config.lr, momentum=job.config.momentum)
        optimizer.build(model.trainable_variables)

    def step(inputs: Any, targets: Any) -> None:
        with tf.GradientTape() as tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(targets, model(inputs, training=True))
            loss = tf.nn.compute_average_loss(losses)  # over the samples of all ranks: gradients are summed
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    distributed = tf.function(lambda inputs, targets: strategy.run(step, (inputs, targets)))
    for rows in job.rows:
        job.clock.tick()
        distributed(tf.constant(inputs[rows.numpy()]), tf.constant(targets[rows.numpy()]))
    put_back(job.model, model.get_weights())


def _convnet(shape: tuple[int, ...], num_classes: int) -> Any:
    layers = tf.keras.layers
    rows, columns = (tf.constant(averages(side)) for side in shape[:2])
    pool = layers.Lambda(lambda images: tf.einsum("ih,jw,nhwc->nijc", rows, columns, images))
    return tf.keras.Sequential([
        layers.Input(shape),
        layers.Conv2D(64, 3, padding="same", activation="relu"),
        layers.Conv2D(128, 3, padding="same", activation="relu"),
        *([] if shape[:2] == (SIDE, SIDE) else [pool]),
        layers.Flatten(),
        layers.Dense(256, activation="relu"),
        layers.Dense(num_classes),
    ])  # fmt: skip
