#!/usr/bin/env bash
exec "$(dirname "$0")/run_learner.sh" plan=hiors export.sources=all record=eval "$@"
