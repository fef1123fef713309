#!/usr/bin/env bash
# The learner of task=metaworld; it needs no Meta-World: run_learner.sh algo=sac task.env_id=door-close-v3 [run_dir=...]
exec "$(dirname "$0")/../experiments/sim_arm/run_learner.sh" task=metaworld "$@"
