#!/usr/bin/env bash
exec "$(dirname "$0")/run_learner.sh" plan=collect algo=rejection policy=flow export.sources=all "$@"
