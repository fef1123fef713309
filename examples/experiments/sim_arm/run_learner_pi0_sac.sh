#!/usr/bin/env bash
exec "$(dirname "$0")/run_learner.sh" plan=sac_pi0 policy=pi0_tiny batch_size=64 head.steps=3 record=eval "$@"
