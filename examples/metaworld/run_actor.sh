#!/usr/bin/env bash
# The actor of task=metaworld, in a Python environment of its own. The first start installs it: 0.4 GB, seconds to a minute.
cd "$(dirname "$0")/../.." || exit 1
python=examples/metaworld/.venv/bin/python
[ -x $python ] || . examples/install.sh --project examples/metaworld || exit 1
exec $python examples/train.py actor=true task=metaworld "$@"
