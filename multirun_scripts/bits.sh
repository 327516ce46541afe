#!/usr/bin/env bash
# From how many bits on is there something to gain?
# Run it from the repository root: two minutes on a laptop; SCALE=smollm2, 1b or 8b for a cluster; [key=value]… changes it.
set -euo pipefail
source "$(dirname "$0")/scale.sh"
[[ $SCALE != tiny ]] || scale+=(quant=w4a4,w8a8)
sweep experiment=bits "$@"
