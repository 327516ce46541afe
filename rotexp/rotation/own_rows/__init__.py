"""Own rows: a sharded weight of which every rank rotates and quantizes its own rows."""
