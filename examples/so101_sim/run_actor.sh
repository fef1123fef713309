#!/usr/bin/env bash
# The actor of task=so101_sim, in a Python environment of its own. The first start installs it: 0.4 GB, seconds to a minute.
cd "$(dirname "$0")/../.." || exit 1
python=examples/so101_sim/.venv/bin/python
[ -x $python ] || . examples/install.sh --project examples/so101_sim || exit 1
exec $python examples/train.py actor=true task=so101_sim "$@"
