"""Run: one experiment on one rank, from its inputs to what it leaves."""
