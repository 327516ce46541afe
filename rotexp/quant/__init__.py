"""Fake quantization: what a quantizer is (`spec`) and the arithmetic that carries it out (`fake`)."""
