#!/usr/bin/env bash
# Runs the tests, also on a fresh machine: see --help.
set -euo pipefail
. "$(dirname -- "${BASH_SOURCE[0]}")/environment.sh"

usage() {
    cat <<'EOF'
usage: scripts/test.sh [--full] [pytest arguments]

Makes .venv, .venv-openmpi and .venv-lowest (the first time only) and runs every layer of the tests, even if others
fail:

    memory     pytest: one process, thread-ranks
    mpi 2 3 4  the tests that also run on MPI ranks, under MPICH's mpiexec -n 2, 3 and 4
    openmpi 2 3 4  those of communication, and of the strategies, under Open MPI's mpiexec
    spawned    jobs whose ranks fail, leave, hang or are killed, and how they end; and jobs on two
               hosts, which are namespaces of this machine: skipped, with the reason, without root
               or namespaces
    static     ruff, import-linter, mypy --strict, the documentation, and the lowest versions that
               setup.cfg allows; at the same time as spawned

Prints each layer's time and verdict and pytest's closing lines, and fails when a layer fails or
has no tests. pytest arguments (-k, -x, files) go to every layer but static, and may leave some
without tests. --full runs whole matrices where a sample is the default.
EOF
}

arguments=()
for argument in "$@"; do
    case "$argument" in
        -h | --help) usage; exit ;;
        --full) export MPISHARD_TEST_FULL=1 ;;
        *) arguments+=("$argument") ;;
    esac
done

trap 'exit 130' INT
unset PYTHONDONTWRITEBYTECODE # some hundred processes start: each would compile all modules anew
prepare_environment mpi plot fast test dev docs
prepare_openmpi
prepare_lowest
cd -- "$root"
set +e # the other layers run even if one fails
logs="$(mktemp -d)"
checks=''
trap 'kill $checks 2>/dev/null; rm -rf -- "$logs"' EXIT

table=''
passing=''
memory_line=''
failing=''
failed=0
tested=0

# layer NAME COMMAND...: runs it, shows its output, and notes time and verdict.
layer() {
    local name="$1" start=$SECONDS code verdict closing
    shift
    printf '\n---- %s\n' "$name"
    "$@" 2>&1 | tee "$logs/layer"
    code=${PIPESTATUS[0]}
    # pytest's exit code if it has selected no test.
    if [ "$code" = 5 ] && [ ${#arguments[@]} -gt 0 ]; then
        verdict='none selected'
    elif [ "$code" = 0 ]; then
        verdict='passed'
    else
        verdict="FAILED (exit code $code)"
        failed=1
    fi
    table+="$(printf '%-9s %5d s  %s' "$name" $((SECONDS - start)) "$verdict")"$'\n'
    [ "$name" != static ] || return 0
    [ "$verdict" = 'none selected' ] || tested=1
    closing="$(grep -aE '(passed|failed|skipped|deselected|errors?|no tests ran).* in [0-9.]+s' \
        "$logs/layer" | tail -n 1)"
    # Failures come last, and after the others the largest layer: the end is what people read.
    if [ "$verdict" = passed ] && [ "$name" = memory ]; then
        memory_line="$closing"$'\n'
    elif [ "$verdict" = passed ]; then
        passing+="$closing"$'\n'
    elif [ "$code" != 5 ] || [ ${#arguments[@]} = 0 ]; then
        failing+="${closing:-"$name: pytest did not come to its closing line"}"$'\n'
    fi
}

# shellcheck disable=SC2329 # layer() calls it, and those below
static() {
    local code=0 types
    "$venv/bin/mypy" --strict mpishard >"$logs/types" 2>&1 & # the slowest, so in the background
    types=$!
    "$venv/bin/ruff" check || code=1
    "$venv/bin/ruff" format --check || code=1
    "$venv/bin/lint-imports" --no-logo || code=1
    NO_MKDOCS_2_WARNING=1 "$venv/bin/mkdocs" build --strict --quiet || code=1
    lowest || code=1
    wait "$types" || code=1
    cat "$logs/types"
    return "$code"
}

# The import, the quick start, each command's --help, and the tests of one room.
# shellcheck disable=SC2329
lowest() {
    OMP_NUM_THREADS=1 PYTHONPATH="$root" "$lowest_python" -m pytest --quiet -p no:cacheprovider \
        -m 'not mpi' tests/sharding tests/cli/test_program.py 'tests/test_readme.py::test_program_runs_as_printed[quickstart-mpi]'
}

# tests/conftest.py chooses the number of processes of -n auto.
memory() {
    OMP_NUM_THREADS=1 "$python" -m pytest -n auto --dist worksteal -m 'not mpi and not spawned and not hosts' \
        ${arguments[@]+"${arguments[@]}"}
}

# Temporary folders have a new root, because the pytest of every rank would remove the folders of
# earlier runs, and they would disturb each other.
# Only tests, without doctests, which do not communicate. A thread watches the time, because a rank
# that waits in MPI handles no signal.
# Each rank takes a second to load numba: only worlds of two ranks use it, and the memory layer. Without
# it attention, GELU and layer norms have other bits: no test compares bits with and without it.
ranks() {
    local numba=auto
    [ "$1" = 2 ] || numba=off
    PYTEST_DEBUG_TEMPROOT="$(mktemp -d -p "$logs")" \
        OMP_NUM_THREADS=1 MPISHARD_NUMBA=$numba "$venv/bin/mpiexec" -n "$1" "$python" -m pytest --with-mpi -m mpi \
        -p no:cacheprovider -o testpaths=tests -o timeout_method=thread \
        ${arguments[@]+"${arguments[@]}"} </dev/null
}

# MPI libraries differ in how data travel, so that few tests of models are enough.
openmpi() {
    local selected=(tests/communication/test_conformance.py tests/communication/test_transfers.py)
    [ "$1" != 2 ] || selected=(tests/communication tests/models/test_equality.py)
    [ ${#arguments[@]} = 0 ] || selected=("${arguments[@]}")
    PYTEST_DEBUG_TEMPROOT="$(mktemp -d -p "$logs")" \
        OMP_NUM_THREADS=1 MPISHARD_NUMBA=off "${openmpi_python%/*}/mpiexec" --allow-run-as-root --oversubscribe \
        --bind-to none -n "$1" "$openmpi_python" -m pytest --with-mpi -m mpi \
        -p no:cacheprovider -o testpaths=tests -o timeout_method=thread \
        "${selected[@]}" </dev/null
}

# tests/conftest.py hands out the tests: first those on hosts, all to one process, then the long
# ones. -rs prints why tests are skipped.
spawned() {
    OMP_NUM_THREADS=1 "$python" -m pytest -n auto -m 'spawned or hosts' -rs -o testpaths=tests \
        ${arguments[@]+"${arguments[@]}"}
}

# shellcheck disable=SC2329
what_static_said() {
    cat "$logs/static"
    return "$static_code"
}

start=$SECONDS
layer memory memory
for size in 2 3 4; do
    layer "mpi $size" ranks $size
done
for size in 2 3 4; do
    layer "openmpi $size" openmpi $size
done
# From here on the static layer runs, too, in the time that jobs leave: their ranks mostly wait.
(renice -n 19 "$BASHPID" >/dev/null 2>&1; static) >"$logs/static" 2>&1 &
checks=$!
layer spawned spawned
wait "$checks"
static_code=$?
checks=''
layer static what_static_said

if [ $tested = 0 ]; then
    failed=1
    failing='no layer has a test that these arguments select'$'\n'
fi
printf '\n---- times\n%s%-9s %5d s\n\n' "$table" all $((SECONDS - start))
printf '%s%s%s' "$passing" "$memory_line" "$failing"
exit $failed
