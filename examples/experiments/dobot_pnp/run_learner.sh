#!/usr/bin/env bash
# The learner of dobot_pnp, on the GPU box: run_learner.sh [plan=...] [algo=...] [run_dir=...]
# It trains on all GPUs. For several boxes, the same command on each, with NNODES (how many), NODE_RANK (which, from 0) and
# MASTER_ADDR (the address of number 0) in the environment; MASTER_PORT is 29500 unless it says otherwise.
cd "$(dirname "$0")/../../.." && exec .venv/bin/python examples/train.py learner=true task=dobot_pnp \
    ${NNODES:+"nodes=$NNODES" "node_rank=${NODE_RANK:-0}" "main=${MASTER_ADDR:-127.0.0.1}:${MASTER_PORT:-29500}"} "$@"
