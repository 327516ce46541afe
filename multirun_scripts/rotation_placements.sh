#!/usr/bin/env bash
# Which rotations carry the gain?
# Run it from the repository root: two minutes on a laptop; SCALE=smollm2, 1b or 8b for a cluster; [key=value]… changes it.
set -euo pipefail
source "$(dirname "$0")/scale.sh"
[[ $SCALE != tiny ]] || scale+=(rotation=none,hadamard,learned,learned_r3_r4)
sweep experiment=rotation_placements "$@"
