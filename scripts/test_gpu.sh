#!/usr/bin/env bash
# Runs the tests of GPUs on a machine that has one: see --help.
set -euo pipefail
. "$(dirname -- "${BASH_SOURCE[0]}")/environment.sh"

usage() {
    cat <<'EOF2'
usage: scripts/test_gpu.sh [--packages FOLDER | --python PYTHON] [pytest arguments]

Makes .venv (the first time only), with the CuPy that fits the driver, and runs on the GPUs of this
machine the tests that scripts/test.sh runs with a substitute for CuPy, and more:

    memory     pytest: one process, thread-ranks, spread over the GPUs
    mpi 2 3    the tests that also run on MPI ranks, under mpiexec -n 2 and 3

--packages FOLDER  installs from the wheels in FOLDER, setuptools among them, and downloads nothing
--python PYTHON    installs nothing: PYTHON has CuPy, pytest and what mpishard needs; MPI is tested if
                   its mpi4py and the mpiexec beside PYTHON, or on PATH, fit. Warnings are no errors

MPI gets addresses of GPU memory only if its library says that it is built for CUDA, or if
MPISHARD_CUDA_AWARE=1. Without a GPU it prints that and tests nothing; the exit code is 0.
EOF2
}

given=''
arguments=()
while [ $# -gt 0 ]; do
    case "$1" in
        -h | --help) usage; exit ;;
        --packages)
            [ -d "${2-}" ] || refuse "--packages needs a folder with wheels, got '${2-}'"
            folder="$(cd -- "$2" && pwd -P)"
            # pip separates folders by spaces, and takes URLs.
            export PIP_NO_INDEX=1 PIP_FIND_LINKS="file://${folder// /%20}"
            shift
            ;;
        --python)
            given="$(command -v -- "${2-}")" || refuse "--python needs an interpreter, got '${2-}'"
            case "$given" in /*) ;; *) given="$PWD/$given" ;; esac
            shift
            ;;
        *) arguments+=("$1") ;;
    esac
    shift
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

trap 'exit 130' INT
cd -- "$root"
# Plugins that others have installed may warn, or change how tests run.
export PYTEST_DISABLE_PLUGIN_AUTOLOAD=1
options=(-p pytest_timeout -p pytest_mpi)
mpiexec="$venv/bin/mpiexec"
if [ -n "$given" ]; then
    python="$given"
    export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
    missing="$("$python" -c '
import importlib.util, sys
print(*(name for name in sys.argv[1:] if importlib.util.find_spec(name) is None))' \
        cupy numpy ml_dtypes rich safetensors threadpoolctl typer pytest pytest_timeout pytest_mpi hypothesis)"
    [ -z "$missing" ] || refuse "$python lacks $missing"
    mpiexec="$(dirname -- "$python")/mpiexec"
    [ -x "$mpiexec" ] || mpiexec="$(command -v mpiexec)" || mpiexec=''
    # Ranks of another library than mpiexec's are worlds of one.
    fits='from mpi4py import MPI; raise SystemExit(MPI.COMM_WORLD.size != 2)'
    if [ -z "$mpiexec" ] || ! "$mpiexec" -n 2 "$python" -c "$fits" </dev/null >/dev/null 2>&1; then
        say "without MPI: ${mpiexec:-no mpiexec} starts no two ranks of the mpi4py of $python"
        mpiexec=''
    fi
    options+=(-o filterwarnings= -W error::cupy._util.PerformanceWarning)
else
    # "CUDA Version: 12.4" is the newest version that the driver supports.
    version="$(nvidia-smi | sed -n 's/.*CUDA Version: \([0-9]*\).*/\1/p')"
    extra=cuda12
    [ "${version:-12}" -lt 13 ] || extra=cuda13
    prepare_environment mpi plot fast test dev "$extra"
fi
# The tests would be skipped on such a GPU.
reason="$("$python" -c 'from mpishard.base.devices import Device; Device.parse("cuda").use()' 2>&1)" ||
    refuse "CuPy cannot use the GPU: ${reason##*$'\n'}"

! "$python" -c 'import xdist' 2>/dev/null || options+=(-p xdist.plugin)
options+=(-o testpaths=tests -rs ${arguments[@]+"${arguments[@]}"})

failed=0
"$python" -m pytest --gpu -m 'gpu and not mpi' "${options[@]}" || failed=1
for size in ${mpiexec:+2 3}; do
    OMP_NUM_THREADS=1 "$mpiexec" -n "$size" "$python" -m pytest --gpu --with-mpi -m 'gpu and mpi' \
        -p no:cacheprovider -o timeout_method=thread "${options[@]}" </dev/null || failed=1
done
exit $failed
