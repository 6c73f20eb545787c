"""Processes and threads that do items in parallel and hand them out in order, resizable while they run."""
