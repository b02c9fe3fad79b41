#!/usr/bin/env bash
# Runs for long what the tests run a sample of: see --help.
set -euo pipefail
. "$(dirname -- "${BASH_SOURCE[0]}")/environment.sh"

trap 'exit 130' INT
case " $* " in *' --help '* | *' -h '*) ;; *)
    prepare_environment mpi plot fast test dev docs
    prepare_openmpi
    ;;
esac
cd -- "$root"
[ -x "$python" ] || refuse "makes .venv first: run scripts/test.sh, or this without --help"
exec "$python" tests/faults/torture.py "$@"
