#!/usr/bin/env bash
# How much does the result vary with the seed of the rotation?
# Run it from the repository root: two minutes on a laptop; SCALE=smollm2, 1b or 8b for a cluster; [key=value]… changes it.
set -euo pipefail
source "$(dirname "$0")/scale.sh"
[[ $SCALE != tiny ]] || scale+=(rotation=hadamard,learned seed=0,1,2)
sweep experiment=rotation_seeds "$@"
