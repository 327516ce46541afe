#!/usr/bin/env bash
# Which rotations carry the gain?
# From the repository root: multirun_scripts/rotation_placements.sh [key=value]…, a minute on a laptop; SCALE=smollm2, 1b or 8b.
set -euo pipefail
source "$(dirname "$0")/scale.sh"
[[ $SCALE != tiny ]] || scale+=(rotation=none,hadamard,learned,learned_r3_r4)
sweep experiment=rotation_placements "$@"
