#!/usr/bin/env bash
exec "$(dirname "$0")/run_learner.sh" plan=expo record=eval "$@"
