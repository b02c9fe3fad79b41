#!/usr/bin/env bash
# Runs long randomized tests, of which the test suite runs a sample: see --help.
set -euo pipefail
. "$(dirname -- "${BASH_SOURCE[0]}")/environment.sh"

usage() {
    cat <<'EOF'
usage: scripts/torture.sh communication [options]
       scripts/torture.sh checkpoint [options]
       scripts/torture.sh elastic [options]

Makes .venv and .venv-openmpi (the first time only), and runs tests with their nightly counts.

communication injects all kinds of faults of tests/faults into jobs: ranks that raise, leave, hang, are
killed, or call another function, on threads and under both MPI libraries, drawn at random. Then it
runs random sequences of collectives. It fails if a job hangs, ends with another exit code than
documented, does not name the rank, or leaves a process behind, or if a collective gives another
result than each rank computes alone.

    --count N   number of injected faults (500)
    --fuzz N    number of random sequences of collectives (10000)
    --seed N    seed of all random numbers (0)
    --jobs N    jobs at a time (one per core)
    --only N    run only the fault of this number, and print the output of its job

checkpoint kills saves, fills their disk and corrupts their files, as docs/reliability.md describes, and
prints the figures. It fails if a torn checkpoint is accepted, or the last whole one is lost.

    --row NAME  kills, states, mutations, disk, machine, layouts or faults; may be repeated
    --count N   trials of each row (its nightly count)
    --seed N    seed of all random numbers (0)

elastic kills runs and continues them in other worlds: see its --help.
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
