#!/usr/bin/env bash
exec "$(dirname "$0")/run_learner.sh" plan=hiors algo=rejection policy=flow export.sources=all record=eval "$@"
