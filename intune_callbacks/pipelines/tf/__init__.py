"""The adapter of tf.data: its graph taken apart, and put together again with operations of our own."""
