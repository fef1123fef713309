#!/usr/bin/env bash
exec "$(dirname "$0")/run_learner_data_collection.sh" policy=pi0_tiny batch_size=64 "$@"
