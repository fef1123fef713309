#!/usr/bin/env bash
# A classifier of success for sim_arm: train_reward.sh plan.sources.given.dataset=/path/to/dataset [run_dir=...]
exec "$(dirname "$0")/run_learner.sh" plan=reward_classifier port=5598 inference_port=5599 run_dir=runs/sim_arm_reward "$@"
