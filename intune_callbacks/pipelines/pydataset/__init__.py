"""The adapter of Keras's PyDataset: workers in the place of Keras's own enqueuer."""
