#!/usr/bin/env bash
# Runs the tests of PyTorch and JAX programs: see --help.
set -euo pipefail
. "$(dirname -- "${BASH_SOURCE[0]}")/environment.sh"

usage() {
    cat <<'END'
usage: scripts/test_frameworks.sh [pytest arguments]

Makes .venv and, beside it, .venv-frameworks with PyTorch, JAX for the CPU, optax, Flax, Equinox,
Haiku, transformers, accelerate and Lightning (the first time only), and runs the tests that scripts/test.sh skips without them:

    memory     pytest: one process, thread-ranks, and spawned jobs
    mpi 2 3 4  the tests that also run on MPI ranks, under mpiexec -n 2, 3 and 4

It downloads about 400 MB if pip finds PyTorch for the CPU. For Linux, PyPI has PyTorch with CUDA, of
several GB: set PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu for the CPU.

pytest arguments go to each layer; files among them replace the default ones.

scripts/test.sh does not run these tests, because the installation takes longer than they do.
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
    say 'making .venv-frameworks: PyTorch and JAX on top of the packages of .venv'
    rm -rf -- "$overlay"
    "$python" -m venv --without-pip -- "$overlay" || refuse "could not make $overlay"
    "$python" -m pip --python "$overlay_python" --disable-pip-version-check install --quiet \
        torch==2.13.0 jax==0.10.2 optax flax equinox dm-haiku ||
        refuse 'the installation of the frameworks failed, for the reason above'
    packages='import sysconfig; print(sysconfig.get_path("purelib"))'
    printf 'import site; site.addsitedir(r"%s")\n' "$("$python" -c "$packages")" \
        >"$("$overlay_python" -c "$packages")/mpishard-of-.venv.pth"
fi
# Without them only tests/torch/test_trainers.py is skipped.
trainers='import importlib.util as u; assert all(map(u.find_spec, "transformers lightning".split()))'
"$overlay_python" -c "$trainers" 2>/dev/null ||
    "$python" -m pip --python "$overlay_python" --disable-pip-version-check install --quiet \
        transformers accelerate lightning || say 'no Trainer, accelerate and Fabric here'

cd -- "$root"
export OMP_NUM_THREADS=1
# mpi4py looks for the MPI library in the environment of its Python, and the overlay has none.
export PATH="$venv/bin:$PATH" LD_LIBRARY_PATH="$venv/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
failed=0
files=(
    tests/torch tests/adapters/test_torch.py tests/adapters/test_jax.py tests/adapters/test_jax_state.py
    tests/adapters/test_optax.py
    tests/adapters/test_function_model.py tests/test_arrays.py
    tests/examples/test_train_torch.py tests/examples/test_train_jax.py
    tests/exports/test_gpt2.py tests/docs/test_reference.py tests/docs/test_combinations.py
    tests/test_array_subclasses.py::test_in_torch_models
    tests/benchmarks/test_compare.py::test_peers_compute_the_same_loss
    'tests/docs/test_pages.py::test_blocks_run_and_print_what_they_say[torch-loop]'
    'tests/docs/test_pages.py::test_blocks_run_and_print_what_they_say[bring-a-torch-module]'
    'tests/docs/test_pages.py::test_blocks_run_and_print_what_they_say[jax-loss]'
)
for argument in "$@"; do
    [ ! -e "${argument%%::*}" ] || files=()
done

# layer COMMAND...: runs it. It fails without a test, unless arguments select tests.
layer() {
    local code=0
    "$@" || code=$?
    [ "$code" = 0 ] || { [ "$code" = 5 ] && [ -n "$selected" ]; } || failed=1
}

selected="$*"
layer "$overlay_python" -m pytest -n 2 --dist worksteal -m 'not mpi' "${files[@]}" "$@"
# A new root for temporary folders, as in test.sh.
folders="$(mktemp -d)"
trap 'rm -rf -- "$folders"' EXIT
for size in 2 3 4; do
    PYTEST_DEBUG_TEMPROOT="$(mktemp -d -p "$folders")" \
        layer "$venv/bin/mpiexec" -n "$size" "$overlay_python" -m pytest --with-mpi -m mpi \
        -p no:cacheprovider -o timeout_method=thread "${files[@]}" "$@" </dev/null
done
exit $failed
