#!/usr/bin/env bash
exec "$(dirname "$0")/run_learner_eval.sh" policy=pi0_tiny "$@"
