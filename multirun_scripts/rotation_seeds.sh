#!/usr/bin/env bash
# How much does the result vary with the seed of the rotation?
# From the repository root: multirun_scripts/rotation_seeds.sh [key=value]…, a minute on a laptop; SCALE=smollm2, 1b or 8b.
set -euo pipefail
source "$(dirname "$0")/scale.sh"
[[ $SCALE != tiny ]] || scale+=(rotation=hadamard,learned seed=0,1,2)
sweep experiment=rotation_seeds "$@"
