"""The Hydra configuration of rotexp: one folder a group, one YAML an option."""
