"""Experiment: one run on one rank, from its inputs to what it leaves."""
