#!/usr/bin/env bash
exec "$(dirname "$0")/run_learner.sh" plan=recap record=eval "$@"
