#!/usr/bin/env bash
# Trains a language model on real text, on MPI ranks with sharded parameters. It needs only Python:
# see --help.
set -euo pipefail
. "$(dirname -- "${BASH_SOURCE[0]}")/environment.sh"

usage() {
    cat <<'EOF'
usage: scripts/train.sh [-n N] [options of the example]

Makes .venv (the first time only), then runs

    mpishard run -n N examples/train_gpt.py [options of the example]

which trains a byte-level GPT on English text on N MPI ranks (default 2), shows its progress, and
leaves metrics, a plot of the loss, checkpoints and a sample in runs/.

If a run was interrupted (Ctrl-C, kill, a full disk), the same command resumes it from its last
checkpoint, also with another N, and says so; --new begins a new run.
EOF
    if [ -e "$venv/mpishard.stamp" ]; then
        echo
        "$python" "$root/examples/train_gpt.py" --help
    fi
}

ranks=2
options=()
while [ $# -gt 0 ]; do
    case "$1" in
        -h | --help) usage; exit ;;
        -n)
            [ $# -ge 2 ] || refuse '-n needs a number of ranks'
            ranks="$2"
            shift
            ;;
        *) options+=("$1") ;;
    esac
    shift
done

prepare_environment mpi plot
cd -- "$root"
exec "$python" -m mpishard run -n "$ranks" examples/train_gpt.py ${options[@]+"${options[@]}"}
