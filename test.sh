#!/usr/bin/env bash
# All tests, and every command of README and docs: no robot, GPU, screen or account needed. With words for pytest the
# tests alone: ./test.sh -m "not slow" runs the short ones.
set -euo pipefail
cd "$(dirname "$0")"
. ./examples/install.sh --extra learner --extra sim --extra data --extra h5py --extra robots --extra hil --extra carracing --extra minigrid --extra atari --extra vla --extra tensorboard --group dev --group bench
.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/python -m pytest -n 2 --dist worksteal "$@" # -n 0 runs them one after the other
[ $# -gt 0 ] || .venv/bin/python tools/readme.py
