#!/usr/bin/env bash
# A first run: installs what is missing, then a simulated arm learns to pick up a block, and is evaluated.
# Everything after the script's name goes to both sides: ./start.sh seed=1 run_dir=runs/second
set -euo pipefail
cd "$(dirname "$0")"
. ./examples/install.sh --extra learner --extra sim
exec examples/experiments/sim_arm/start_tmux.sh "$@"
