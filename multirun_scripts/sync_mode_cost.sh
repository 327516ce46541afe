#!/usr/bin/env bash
# What does each way of ordering unshards cost a step?
# Run it from the repository root: two minutes on a laptop; SCALE=smollm2, 1b or 8b for a cluster; [key=value]… changes it.
set -euo pipefail
source "$(dirname "$0")/scale.sh"
sweep experiment=sync_mode_cost "$@"
