#!/usr/bin/env bash
# Passes the tests of PyTorch and JAX programs: see --help.
set -euo pipefail
. "$(dirname -- "${BASH_SOURCE[0]}")/environment.sh"

usage() {
    cat <<'END'
usage: scripts/test_frameworks.sh [pytest arguments]

Makes .venv and, beside it, .venv-frameworks with PyTorch and JAX for the CPU, optax, Flax, Equinox
and Haiku (the first time only; about 400 MB are fetched), and runs the tests that scripts/test.sh
skips for want of them:

    memory     pytest: one process, thread-ranks, and jobs of their own
    mpi 2 3    the tests that also run on MPI ranks, under mpiexec -n 2 and 3

They are no part of scripts/test.sh: their installation takes longer than these tests.
END
}

for argument in "$@"; do
    case "$argument" in -h | --help) usage; exit ;; esac
done

trap 'exit 130' INT
prepare_environment mpi plot fast test dev docs
overlay="$root/.venv-frameworks"
overlay_python="$overlay/bin/python"
is_whole='
import importlib.util, mpishard
assert all(map(importlib.util.find_spec, "torch jax optax flax equinox haiku".split()))'
if ! "$overlay_python" -c "$is_whole" 2>/dev/null; then
    say 'making .venv-frameworks: PyTorch and JAX beside what .venv has'
    rm -rf -- "$overlay"
    "$python" -m venv --without-pip -- "$overlay" || refuse "could not make $overlay"
    "$python" -m pip --python "$overlay_python" --disable-pip-version-check install --quiet \
        torch==2.13.0 jax==0.10.2 optax flax equinox dm-haiku ||
        refuse 'the installation of the frameworks failed, for the reason above'
    packages='import sysconfig; print(sysconfig.get_path("purelib"))'
    printf 'import site; site.addsitedir(r"%s")\n' "$("$python" -c "$packages")" \
        >"$("$overlay_python" -c "$packages")/mpishard-of-.venv.pth"
fi

cd -- "$root"
export OMP_NUM_THREADS=1
# mpi4py looks for the MPI library in the environment that Python belongs to: the overlay has none.
export PATH="$venv/bin:$PATH" LD_LIBRARY_PATH="$venv/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
failed=0
files=(
    tests/torch tests/adapters/test_torch.py tests/adapters/test_jax.py tests/adapters/test_optax.py
    tests/examples/test_train_torch.py tests/examples/test_train_jax.py
)
[ $# = 0 ] || files=()
"$overlay_python" -m pytest -n 2 --dist worksteal -m 'not mpi' "${files[@]}" "$@" || failed=1
# As in test.sh: among folders of earlier runs the ranks' pytests clear the same ones away.
folders="$(mktemp -d)"
trap 'rm -rf -- "$folders"' EXIT
for size in 2 3; do
    PYTEST_DEBUG_TEMPROOT="$(mktemp -d -p "$folders")" \
        "$venv/bin/mpiexec" -n "$size" "$overlay_python" -m pytest --with-mpi -m mpi \
        -p no:cacheprovider -o timeout_method=thread "${files[@]}" "$@" </dev/null || failed=1
done
exit $failed
