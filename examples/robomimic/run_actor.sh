#!/usr/bin/env bash
# The actor of task=robomimic, in a Python environment of its own. The first start installs it: 1.1 GB, a minute or two.
cd "$(dirname "$0")/../.." || exit 1
python=examples/robomimic/.venv/bin/python
[ -x $python ] || . examples/install.sh --project examples/robomimic || exit 1
exec $python examples/train.py actor=true task=robomimic "$@"
