"""Config: the schema, its validation and composition, what `_target_` may name, and how mistakes are explained."""
