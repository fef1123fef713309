#!/usr/bin/env bash
exec "$(dirname "$0")/run_learner.sh" plan=hiors policy.imitation_target=observation.state policy.scale=range export.sources=all record=eval "$@"
