#!/usr/bin/env bash
# The learner of task=robomimic; it needs no robosuite: run_learner.sh [plan=...] [policy=chunk head=...] [run_dir=...]
exec "$(dirname "$0")/../experiments/sim_arm/run_learner.sh" task=robomimic "$@"
