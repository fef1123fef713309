#!/usr/bin/env bash
# Dreamer learns to balance a pole by choosing among pushes: learner and actor on this machine. Some minutes of two
# cores. Words go to both sides: start.sh seed=1 run_dir=runs/second
set -euo pipefail
cd "$(dirname "$0")/../../.."
. ./examples/install.sh --extra learner --extra sim
exec examples/experiments/sim_arm/start_tmux.sh plan=dreamer algo=dreamer_tiny task=gym task.env_id=CartPole-v1 \
    utd=1 random_steps=500 max_env_steps=3000 run_dir=runs/dreamer_cartpole "$@"
