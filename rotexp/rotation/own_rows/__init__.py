"""Own rows: a sharded weight of which every rank rotates and quantizes its own rows.

Own rows are those of a weight that FSDP2's shard of this rank holds (`OwnRows` works on them). A weight is divided
(`DividedWeight`, `linear.divided`) while each rank rotates and quantizes its own rows and the codes are gathered; else
it is whole: gathered as it is, then rotated and quantized by every rank. A `Division` is a model's divided weights, and
`dividing` is in force as long as they are. `cost` says which of both is cheaper, `division` chooses, `weight` stands
between FSDP2 and the rows, `rows` does the arithmetic.
"""
