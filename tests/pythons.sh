#!/usr/bin/env bash
# What lerobot reads, writes and drives, on another Python with its newest version, and real programs for each promise of
# README: tests/pythons.sh 3.12, or 3.13
# Then the data path with the newest numpy, which lerobot does not take yet, but a program of somebody else may bring.
# The Python is the one on PATH, one of pyenv's, or one that uv fetches. Its environment is made beside .venv, and removed.
set -euo pipefail
cd "$(dirname "$0")/.."
export UV_PROJECT_ENVIRONMENT=.venv-$1
trap 'rm -rf "$UV_PROJECT_ENVIRONMENT"' EXIT
found=$(ls -d "$HOME/.pyenv/versions/$1".*/bin/python 2>/dev/null | tail -1 || :)
. ./examples/install.sh --python "${found:-$1}" --extra learner --extra sim --extra data --extra robots --extra vla --group dev
python=$PWD/$UV_PROJECT_ENVIRONMENT/bin/python
"$python" -m pytest -q -n 2 --dist worksteal -m "not nightly and not manual" \
    -W ignore::pytest.PytestUnraisableExceptionWarning `# 3.13 tells of SQLite connections that a test leaves behind` \
    tests/datasets tests/policies/test_lerobot.py tests/policies/test_reward_model.py tests/robot/test_feetech.py tests/robot/test_lerobot_*.py tests/programs/test_lerobot.py \
    tests/programs/test_own_task.py tests/programs/test_absent_person.py tests/programs/test_lerobot_policy.py \
    'tests/training/test_sharding.py::test_after_a_kill_it_goes_on_bit_for_bit[lerobot]'
"$python" -m pytest -q -n 2 --dist worksteal -m "program and not slow and not nightly and not manual" \
    -W ignore::pytest.PytestUnraisableExceptionWarning tests/programs
(cd / && uv pip install --quiet --no-config --upgrade --python "$python" numpy) # this project's list would refuse it
"$python" -m pytest -q -n 2 --dist worksteal -m "not slow and not nightly and not manual and not program" \
    -W ignore::pytest.PytestUnraisableExceptionWarning tests/client tests/store tests/replay tests/service
