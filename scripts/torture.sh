#!/usr/bin/env bash
# Runs for long what the tests run a sample of: see --help.
set -euo pipefail
. "$(dirname -- "${BASH_SOURCE[0]}")/environment.sh"

usage() {
    cat <<'EOF'
usage: scripts/torture.sh communication [options]

Makes .venv and .venv-openmpi (the first time only), and hurts jobs in every way that tests/faults
knows: ranks that raise, leave, hang, are killed, or call something else, on threads and under both
MPI libraries, drawn at random; then runs random sequences of collectives. Fails when a job hangs,
ends with another exit code than documented, does not name the rank, leaves a process behind, or a
collective gives another result than each rank computes alone.

    --count N   injected faults (500)
    --fuzz N    random sequences of collectives (10000)
    --seed N    of all that is drawn (0)
    --jobs N    jobs at a time (one a core)
    --only N    the fault of this number alone, with all that its job printed
EOF
}

case " $* " in *' --help '* | *' -h '* | '  ') usage; exit ;; esac
trap 'exit 130' INT
prepare_environment mpi plot fast test dev docs
prepare_openmpi
cd -- "$root"
exec "$python" tests/faults/torture.py "$@"
