# Sourced with what is wanted, as uv says it (--extra learner --extra sim --extra data; nothing: a robot PC): puts .venv
# in place with uv, which it installs when it is missing. Nothing that is installed already is removed.
PATH="$PWD/.uv/bin:$PATH"
if ! command -v uv >/dev/null; then
    python3 -m venv .uv || { echo "Python's venv module is missing: apt-get install python3-venv" >&2; exit 1; }
    .uv/bin/python -m pip install --quiet "uv>=0.13,<0.14"
fi
if [ ! -x .venv/bin/python ] && [[ " $* " == *" learner "* ]]; then
    free=$(df --output=avail --block-size=1G . | tail -1 | tr -d ' ')
    if [ "$free" -lt 12 ]; then
        echo "The installation takes 7 GB (most of it CUDA libraries of torch) and room for downloads: 12 GB are needed," \
            "$free GB are free here." >&2
        exit 1
    fi
    echo "Installing into .venv: about 7 GB, a few minutes the first time." >&2
fi
uv sync --quiet --inexact "$@"
