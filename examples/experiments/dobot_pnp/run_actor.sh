#!/usr/bin/env bash
# Both arms, on the robot PC: run_actor.sh [robot=sim] [ip=...] [name=...]
cd "$(dirname "$0")/../../.." && exec .venv/bin/python examples/train.py actor=true task=dobot_pnp "$@"
