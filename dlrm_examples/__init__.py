"""Meta's DLRM on Criteo data: the examples `InTuneCallback` is shown and measured on.

tsv.py               the TSV format, and a plain parser that defines it
criteo.py            the same parser for blocks: kernel.py with numba, swar.py with numpy
formats.py           TSV, gzip, Zstandard and Parquet behind one interface
blocks.py            TSV files cut into byte ranges at line ends, the train/test split
compressed.py        gzip and Zstandard files cut into pieces
parquet.py           Parquet files by row groups
convert.py           TSV in those formats: python -m dlrm_examples.convert DIR FILE.tsv --format parquet
stages.py            read, parse, shuffle, batch, collate
pipeline.py          those stages as a torchdata.nodes graph
stages_tf.py         the stages as tf.data operations
pipeline_tf.py       the same as a tf.data pipeline, as most people write it and as it should be written
arguments.py         what both accept
generate.py          Criteo-shaped data of any size: python -m dlrm_examples.generate DIR --rows N
tables.py            rows of the embedding tables of the public data sets
sizes.py             the sizes of the model
model_torch.py       the model
layers_torch.py      cross layers and bags of ids, for DLRM-DCNv2
multihot.py          how one id becomes a bag of several
optimizers.py        Adagrad, also row-wise; optimizers_keras.py: the same in Keras
schedule.py          the learning rate's warm-up and decay
lightning_module.py  the model as a LightningModule
model_keras.py       the model in Keras 3
metrics.py           AUC, accuracy, log loss
plan.py              which GPU holds which table, on paper: `intune plan`
plan_bytes.py        what that needs, and what it sends
plan_cures.py        what would make it fit
plan_text.py         its command line, text and JSON
shards.py            one rank's share of the pipeline
hybrid.py            the model with its tables divided among ranks, by TorchRec; and under Lightning and Keras:
                     hybrid_lightning.py, hybrid_keras.py; hybrid_*.py are their parts
check_oracle.py      the model against Meta's own numbers: python -m dlrm_examples.check_oracle FILE.npz
oracle_*.py          each model's side of that
auc.py, hashing.py, scratch.py   small helpers
"""
