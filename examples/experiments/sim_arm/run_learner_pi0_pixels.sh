#!/usr/bin/env bash
exec "$(dirname "$0")/run_learner_pi0_reject_sampling.sh" task=sim_arm_pixels algo=rejection_pixels batch_size=32 algo.optimizer.learning_rate=3e-4 "$@"
