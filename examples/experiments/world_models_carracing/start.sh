#!/usr/bin/env bash
# World Models learn to drive a car round a track from pictures: learner and actor on this machine. The published result
# took the episodes of 10,000 drifts and of 1,800 generations; max_env_steps says how many of those there is time for.
# The replay buffers take 6 GB of disk. Words go to both sides: start.sh max_env_steps=2000000 run_dir=runs/second
set -euo pipefail
cd "$(dirname "$0")/../../.."
. ./examples/install.sh --extra learner --extra sim --extra carracing
exec examples/experiments/sim_arm/start_tmux.sh plan=world_models algo=world_models task=carracing \
    random_steps=100000 plan.sources.drift.capacity=100000 max_env_steps=20000000 plan.sources.online.capacity=100000 \
    run_dir=runs/world_models_carracing "$@"
