#!/usr/bin/env bash
exec "$(dirname "$0")/run_learner.sh" plan=collect export.sources=all "$@"
