"""Measure: data wait, machine resources, rates per stage, verdict."""
