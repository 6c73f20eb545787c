"""The Keras model's side of `check_oracle`: outputs, gradients and one step of `train_on_batch`, on any backend."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import ops

from dlrm_examples.models.dlrm_keras import DLRM
from dlrm_examples.oracle.file import Array, Oracle

__all__ = ["run"]


def run(oracle: Oracle) -> dict[str, Array]:
    """Push the batch through `dlrm_keras.DLRM`; return everything named by `Oracle.expected`."""
    arrays = oracle.arrays
    model = DLRM(oracle.sizes)
    layers = {f"{part}.{k}": layer for part in ("bot", "top") for k, layer in enumerate(_mlp(model, part))}
    for name, layer in layers.items():
        layer.set_weights([arrays[f"{name}.w"].T, arrays[f"{name}.b"]])
    model.tables.assign(np.concatenate([arrays[f"emb.{table}"] for table in range(len(oracle.table_rows))]))

    dense, ids, starts = arrays["dense"], arrays["idx"].astype(np.int32), arrays["off"].astype(np.int32)
    # One id per bag goes the way that training goes.
    single = ids.shape == starts.shape and bool((starts == np.arange(ids.shape[1])).all())
    lookup = {"categories": ids.T.copy()} if single else {"categories": ids, "bag_starts": starts}
    bottom = ops.convert_to_tensor(dense)
    for layer in model.bottom:
        bottom = layer(bottom)
    embedded = model.embed(*lookup.values())
    inputs = {"dense": dense, **lookup}
    probability = ops.sigmoid(model(inputs))
    loss, gradients = _gradients(model, inputs, arrays["labels"])
    got = {
        "out.bot": _numpy(bottom),
        "out.emb": _numpy(ops.transpose(embedded, (1, 0, 2))),
        "out.interact": _numpy(model.interact(bottom, embedded)),
        "out.prob": _numpy(probability),
        "out.loss": _numpy(loss),
    }
    of = dict(zip((variable.path for variable in model.trainable_variables), gradients, strict=True))
    for name, layer in layers.items():
        got |= {f"grad.{name}.w": of[layer.kernel.path].T, f"grad.{name}.b": of[layer.bias.path]}
    got |= {f"grad.emb.{t}": of[model.tables.path][model.rows_of(t)] for t in range(len(oracle.table_rows))}

    optimizer = keras.optimizers.SGD(oracle.learning_rate)
    if single:
        model.compile(optimizer, keras.losses.BinaryCrossentropy(from_logits=True))
        model.train_on_batch(inputs, arrays["labels"])
    else:
        # Bags of several ids are no batch for Keras: their arrays are not one row per sample.
        given = [ops.convert_to_tensor(of[variable.path]) for variable in model.trainable_variables]
        optimizer.apply(given, model.trainable_variables)
    for name, layer in layers.items():
        got |= {f"sgd.{name}.w": _numpy(layer.kernel).T, f"sgd.{name}.b": _numpy(layer.bias)}
    got |= {f"sgd.emb.{table}": model.table(table) for table in range(len(oracle.table_rows))}
    return got


def _mlp(model: DLRM, part: str) -> list[Any]:
    return list(model.bottom if part == "bot" else model.top)


def _numpy(value: Any) -> Array:
    return np.array(ops.convert_to_numpy(value))


def _gradients(model: DLRM, inputs: dict[str, Array], labels: Array) -> tuple[Any, list[Array]]:
    """Return the loss and its gradient with respect to each trainable variable, dense."""
    backend = keras.backend.backend()
    if backend == "tensorflow":
        import tensorflow as tf

        with tf.GradientTape() as tape:
            loss = _loss(model(inputs), labels)
        found = tape.gradient(loss, [variable.value for variable in model.trainable_variables])
        return loss, [_numpy(tf.convert_to_tensor(gradient)) for gradient in found]
    if backend == "torch":
        loss = _loss(model(inputs), labels)
        model.zero_grad()
        loss.backward()
        found = [variable.value.grad for variable in model.trainable_variables]
        return loss, [_numpy(gradient.to_dense()) for gradient in found]
    import jax

    def of(trainable: list[Any]) -> Any:
        logits, _ = model.stateless_call(trainable, model.non_trainable_variables, inputs)
        return _loss(logits, labels)

    loss, found = jax.value_and_grad(of)([variable.value for variable in model.trainable_variables])
    return loss, [_numpy(gradient) for gradient in found]


def _loss(logits: Any, labels: Array) -> Any:
    # Meta's loss is taken from the rounded probability; from the log-odds it would be closer to the truth than to them.
    return ops.mean(ops.binary_crossentropy(ops.convert_to_tensor(labels), ops.sigmoid(logits)))
