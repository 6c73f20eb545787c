"""Meta's DLRM on Criteo data: the examples `InTuneCallback` is shown and measured on.

generate.py      Criteo-shaped data of any size: python -m dlrm_examples.generate DIR --rows N
convert.py       Criteo files in other formats: intune convert PATH OUT
check_oracle.py  the model against Meta's own numbers: python -m dlrm_examples.check_oracle FILE.npz
criteo/          Criteo files, whatever their format, as pipelines of torchdata.nodes and tf.data
models/          the model in PyTorch and in Keras, its optimisers, learning rate and metrics
hybrid/          the model with its tables divided among ranks
plan/            which GPU holds which table, on paper: `intune plan`
oracle/          each model's side of check_oracle.py

The order of the imports: criteo, models, hybrid or plan or oracle, the commands; `tests/test_imports.py`.
"""
