#!/usr/bin/env bash
# Measures this machine and updates docs/performance.md and its pictures: see --help.
set -euo pipefail
. "$(dirname -- "${BASH_SOURCE[0]}")/environment.sh"

usage() {
    cat <<'END'
usage: scripts/benchmarks.sh [options of benchmarks/compare.py]

Makes .venv (the first time only), compares this package's training steps with those of PyTorch and
JAX, keeps the results in this processor's file in benchmarks/results/processors, writes those of all
processors into docs/performance.md and benchmarks/results/targets.md, and draws docs/images/steps.svg,
growth_*.png and collectives.png. It takes an hour on an idle machine. Commit first: the file has the
commit that was measured.
PyTorch and JAX are taken from .venv-peers if it exists:

    python3 -m venv .venv-peers && .venv-peers/bin/pip install torch jax optax -e '.[mpi]'
END
}

for argument in "$@"; do
    case "$argument" in
        -h | --help) usage; exit ;;
    esac
done

prepare_environment mpi plot fast bf16
cd -- "$root"
options=(--keep)
[ ! -x .venv-peers/bin/python ] || options+=(--peer-python .venv-peers/bin/python)
"$python" benchmarks/compare.py "${options[@]}" "$@"
"$python" benchmarks/compare.py --report --page docs/performance.md --targets benchmarks/results/targets.md
"$python" benchmarks/draw_steps.py
"$python" benchmarks/growth.py --images docs/images
