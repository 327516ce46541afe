#!/usr/bin/env bash
# What does each way of ordering unshards cost a step?
# From the repository root: multirun_scripts/sync_mode_cost.sh [key=value]…, a minute on a laptop; SCALE=smollm2, 1b or 8b.
set -euo pipefail
source "$(dirname "$0")/scale.sh"
sweep experiment=sync_mode_cost "$@"
