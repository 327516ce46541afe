"""rotexp trains the rotations that let a large language model be quantized, sharded and measured."""
