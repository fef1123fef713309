#!/usr/bin/env bash
exec "$(dirname "$0")/run_learner.sh" plan=evaluate record=eval "$@"
