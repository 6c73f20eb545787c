"""Adapters of torch's DataLoader, map-style and iterable-style, and of torchdata.nodes."""
