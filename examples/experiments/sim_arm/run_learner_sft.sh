#!/usr/bin/env bash
exec "$(dirname "$0")/run_learner.sh" plan=sft algo=rejection policy=flow record=eval "$@"
