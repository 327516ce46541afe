#!/usr/bin/env bash
# Which learning rate suits which step rule?
# Run it from the repository root: two minutes on a laptop; SCALE=smollm2, 1b or 8b for a cluster; [key=value]… changes it.
set -euo pipefail
source "$(dirname "$0")/scale.sh"
[[ $SCALE != tiny ]] || scale+=(optimizer.lr=0.03,0.1,0.3)
sweep experiment=learning_rate "$@"
