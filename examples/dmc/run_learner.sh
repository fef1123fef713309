#!/usr/bin/env bash
# The learner of task=dmc; it needs no dm_control: run_learner.sh algo=sac task.env_id=cartpole-balance [run_dir=...]
exec "$(dirname "$0")/../experiments/sim_arm/run_learner.sh" task=dmc "$@"
