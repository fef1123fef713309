#!/usr/bin/env bash
exec "$(dirname "$0")/run_learner.sh" plan=sft policy.imitation_target=observation.state policy.scale=range record=eval "$@"
