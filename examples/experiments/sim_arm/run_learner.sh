#!/usr/bin/env bash
# The learner of the simulated arm, on the GPU box: run_learner.sh [plan=...] [algo=...] [run_dir=...]
cd "$(dirname "$0")/../../.." && exec .venv/bin/python examples/train.py learner=true task=sim_arm "$@"
