#!/usr/bin/env bash
exec "$(dirname "$0")/run_learner_reject_sampling.sh" policy=pi0_tiny batch_size=64 "$@"
