#!/usr/bin/env bash
# From how many bits on is there something to gain?
# From the repository root: multirun_scripts/bits.sh [key=value]…, a minute on a laptop; SCALE=smollm2, 1b or 8b.
set -euo pipefail
source "$(dirname "$0")/scale.sh"
[[ $SCALE != tiny ]] || scale+=(quant=w4a4,w8a8)
sweep experiment=bits "$@"
