"""Fake quantization: what a quantizer is (`spec`), what a format of numbers says (`quantizer`), and what all share."""
