#!/usr/bin/env bash
# The simulated arm itself, on the robot PC: run_actor.sh [ip=...] [name=...]
cd "$(dirname "$0")/../../.." && exec .venv/bin/python examples/train.py actor=true task=sim_arm "$@"
