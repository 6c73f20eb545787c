"""Simulated machines with input pipelines: where the agent learns and where policies are compared."""
