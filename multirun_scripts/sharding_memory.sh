#!/usr/bin/env bash
# How does each rank's peak memory fall with each sharding as the model grows?
# Run it from the repository root: two minutes on a laptop; SCALE=smollm2, 1b or 8b for a cluster; [key=value]… changes it.
set -euo pipefail
source "$(dirname "$0")/scale.sh"
case "$SCALE" in
  tiny) scale+=(model.size=nano sharding=no_shard,zero2,full) ;;
  smollm2) scale+=(model.size=135m,360m) ;;
  1b) scale+=(model.size=1b,3b) ;;
  8b) scale+=(model.size=8b,70b sharding=full,hybrid) ;;
esac
sweep experiment=sharding_memory model=random_llama "$@"
