"""Measurements: what every figure is called and means, and how it is taken."""
