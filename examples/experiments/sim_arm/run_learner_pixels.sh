#!/usr/bin/env bash
exec "$(dirname "$0")/run_learner_reject_sampling.sh" task=sim_arm_pixels algo=rejection_pixels policy=flow_pixels "$@"
