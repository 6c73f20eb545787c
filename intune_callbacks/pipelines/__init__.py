"""Reach: one protocol, one adapter per framework, one resizable stage."""
