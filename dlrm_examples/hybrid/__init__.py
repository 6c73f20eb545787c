"""The DLRM with its tables divided among ranks, by TorchRec.

model.py                  the model and its optimisers
lightning.py, keras.py    the same under Lightning, and under Keras on torch
jax.py                    under Keras on JAX, without TorchRec
weights.py, checkpoint.py drawn, put together again, written and read
ranks.py                  starts the ranks of a run
install.py                how TorchRec is installed
"""
