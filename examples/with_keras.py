import time

import keras
import tensorflow as tf

from intune_callbacks.keras import InTuneCallback

ROWS = 3200


def load(index):
    time.sleep(0.004)  # a slow disk
    return index


def as_row(index):
    index = tf.ensure_shape(tf.numpy_function(load, [index], tf.int64), [])
    return tf.fill([16], tf.cast(index, tf.float32) / ROWS), tf.zeros([1])


def main():
    dataset = tf.data.Dataset.range(ROWS).shuffle(256, seed=0).map(as_row, num_parallel_calls=1).batch(16).prefetch(2)
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.fit(dataset, epochs=3, callbacks=[InTuneCallback()])


if __name__ == "__main__":
    main()
