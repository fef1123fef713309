#!/usr/bin/env bash
exec "$(dirname "$0")/run_learner.sh" plan=sac_pi0 policy=pi0_tiny record=eval "$@"
