#!/usr/bin/env bash
# The learner of task=so101_sim; it needs no lerobot-env-so101: run_learner.sh plan=hiors [run_dir=...]
exec "$(dirname "$0")/../experiments/sim_arm/run_learner.sh" task=so101_sim "$@"
