"""Meta's DLRM on Criteo data: the examples `InTuneCallback` is shown and measured on.

tsv.py               the TSV format, and a plain parser that defines it
criteo.py            the same parser, vectorised over blocks
blocks.py            files cut into byte ranges at line ends, the train/test split
stages.py            read, parse, shuffle, batch, collate
pipeline.py          those stages as a torchdata.nodes graph
generate.py          Criteo-shaped data of any size: python -m dlrm_examples.generate DIR --rows N
model_torch.py       the model
lightning_module.py  the model as a LightningModule
check_oracle.py      the model against Meta's own numbers: python -m dlrm_examples.check_oracle FILE.npz
auc.py, hashing.py   two small helpers
"""
