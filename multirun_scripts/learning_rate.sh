#!/usr/bin/env bash
# Which learning rate suits which step rule?
# From the repository root: multirun_scripts/learning_rate.sh [key=value]…, a minute on a laptop; SCALE=smollm2, 1b or 8b.
set -euo pipefail
source "$(dirname "$0")/scale.sh"
[[ $SCALE != tiny ]] || scale+=(optimizer.lr=0.03,0.1,0.3)
sweep experiment=learning_rate "$@"
