"""What is written down: decisions, the report, and how a run that is under way is read."""
