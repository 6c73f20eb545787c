"""Criteo files: their formats, parsed by blocks, as pipelines whose stages can be tuned one by one.

tsv.py          the TSV format, and a plain parser that defines it
parse.py        the same for blocks: kernel.py with numba, swar.py with numpy
blocks.py       TSV files cut into byte ranges at line ends, the train/test split
compressed.py   gzip and Zstandard files cut into pieces
parquet.py      Parquet files by row groups
packed.py       rows that were parsed before, in blocks with checksums
arrays.py       such rows mapped into memory, from packed files or arrays of others
formats.py      all of them behind one interface
reading.py      what the pipelines are asked for
stages.py       read, parse, shuffle, batch, collate
pipeline.py     those stages as a torchdata.nodes graph
shards.py       one rank's share of it
stages_tf.py    the stages as tf.data operations
pipeline_tf.py  the same as a tf.data pipeline, as most people write it and as it should be written
cache.py        blocks that were parsed before, on a local disk
hashing.py, scratch.py   small helpers
"""
