#!/usr/bin/env bash
# Runs the tests of GPUs on a machine that has one: see --help.
set -euo pipefail
. "$(dirname -- "${BASH_SOURCE[0]}")/environment.sh"

usage() {
    cat <<'EOF2'
usage: scripts/test_gpu.sh [pytest arguments]

Makes .venv (the first time only), with the CuPy that fits the driver, and runs on the GPUs of this
machine the tests that scripts/test.sh runs with a substitute for CuPy, and more:

    memory     pytest: one process, thread-ranks, dealt over the GPUs
    mpi 2 3    the tests that also run on MPI ranks, under mpiexec -n 2 and 3

Without a GPU it prints that and tests nothing; the exit code is 0.
EOF2
}

for argument in "$@"; do
    case "$argument" in -h | --help) usage; exit ;; esac
done

if ! command -v nvidia-smi >/dev/null; then
    say 'skipped: there is no CUDA driver here (no nvidia-smi on PATH), so nothing was tested'
    exit
fi
gpus="$(nvidia-smi -L 2>&1)" || gpus=''
if [ -z "$gpus" ]; then
    say 'skipped: nvidia-smi lists no GPU, so nothing was tested'
    exit
fi
printf '%s\n' "$gpus"

# "CUDA Version: 12.4" is the newest version that the driver supports.
version="$(nvidia-smi | sed -n 's/.*CUDA Version: \([0-9]*\).*/\1/p')"
extra=cuda12
[ "${version:-12}" -lt 13 ] || extra=cuda13

trap 'exit 130' INT
prepare_environment mpi plot fast test dev "$extra"
cd -- "$root"
failed=0
"$python" -m pytest --gpu -m 'gpu and not mpi' -o testpaths=tests -rs "$@" || failed=1
for size in 2 3; do
    OMP_NUM_THREADS=1 "$venv/bin/mpiexec" -n "$size" "$python" -m pytest --gpu --with-mpi \
        -m 'gpu and mpi' -p no:cacheprovider -o testpaths=tests -o timeout_method=thread -rs \
        "$@" </dev/null || failed=1
done
exit $failed
