"""The evaluation of the InTune paper, re-run beside everything a user would pick instead: one module per figure."""
