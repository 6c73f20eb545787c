"""An audio pipeline on tf.data, as its authors wrote it; where from: `benchmarks.wild.catalogue_vision`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf

from benchmarks.wild.data import SEED, waves
from benchmarks.wild.entry import Numbers
from benchmarks.wild.models_keras import calls, compiled

RATE, SPEAKERS, NOISES, SHUFFLE_SEED = 16_000, 5, 60, 43


# -- keras-io: speaker recognition, wav files one after the other, noise and a Fourier transform -----------------------


def speaker_data(folder: Path, rows: int) -> None:
    waves(folder, rows, SPEAKERS, RATE)


def speaker(folder: Path, numbers: Numbers, batch: int) -> Any:
    paths = sorted(map(str, folder.glob("*/*.wav")))
    labels = [int(Path(path).parent.name) for path in paths]
    for values in (paths, labels):
        np.random.RandomState(SHUFFLE_SEED).shuffle(values)
    noises = tf.constant(np.random.default_rng(SEED).normal(0, 0.1, (NOISES, RATE, 1)).astype(np.float32))

    def path_to_audio(path: Any) -> Any:
        audio, _ = tf.audio.decode_wav(tf.io.read_file(path), 1, RATE)
        return audio

    def add_noise(audio: Any, label: Any) -> Any:
        drawn = tf.cast(tf.abs(audio[:, 100, 0]) * 1e6, tf.int32) % NOISES
        noise = tf.gather(noises, drawn, axis=0)
        part = tf.reduce_max(audio, axis=1, keepdims=True) / tf.reduce_max(noise, axis=1, keepdims=True)
        return audio + noise * part * 0.5, label

    def audio_to_fft(audio: Any, label: Any) -> Any:
        wave = tf.squeeze(audio, axis=-1)
        spectrum = tf.signal.fft(tf.cast(tf.complex(wave, tf.zeros_like(wave)), tf.complex64))
        return tf.abs(spectrum[:, : RATE // 2, None]), label

    audios = tf.data.Dataset.from_tensor_slices(paths)
    audios = audios.map(path_to_audio, num_parallel_calls=calls(numbers["path_to_audio"]))
    dataset = tf.data.Dataset.zip((audios, tf.data.Dataset.from_tensor_slices(labels)))
    dataset = dataset.shuffle(batch * 8, seed=SHUFFLE_SEED).batch(batch)
    dataset = dataset.map(add_noise, num_parallel_calls=calls(numbers["add_noise"]))
    dataset = dataset.map(audio_to_fft, num_parallel_calls=calls(numbers["audio_to_fft"]))
    return dataset.prefetch(numbers["prefetch"])


def speaker_model() -> Any:
    spectrum = keras.Input([RATE // 2, 1])
    hidden = spectrum
    for filters in (8, 16, 32):
        hidden = keras.layers.Conv1D(filters, 5, strides=4, activation="relu")(hidden)
    hidden = keras.layers.Dense(64, "relu")(keras.layers.Flatten()(keras.layers.AveragePooling1D(8)(hidden)))
    return compiled(spectrum, keras.layers.Dense(SPEAKERS, "softmax")(hidden), "sparse_categorical_crossentropy")
