#!/usr/bin/env bash
# A real SLURM on hosts of netns.sh: node1 is the login node with slurmctld, node2.. run slurmd.
#
#   slurm.sh up [N [CPUS]]    N compute nodes (2) that claim CPUS processors each (32, as train.sbatch)
#   slurm.sh down             end and remove all
#   slurm.sh login CMD..      run CMD on the login node, in the working directory
#   slurm.sh slurmd I         start the daemon of host I (again)
#   slurm.sh mend             thaw and plug all nodes, start daemons that died, cancel all jobs
#   slurm.sh OTHER..          netns.sh OTHER.. on these hosts
#
# Needs root, what netns.sh needs, and apt-get install slurm-wlm munge; libpmix-dev for --mpi=pmix.
# Settings: SLURMD_TIMEOUT (20 s; SLURM's default is 300), KILL_WAIT (30), MPI_DEFAULT (none),
# GRACE (60), OVER_TIME (0 minutes), EXTRA (further lines of slurm.conf); MH_STATE_SLURM,
# MH_PRE_SLURM and MH_NET_SLURM as the variables of netns.sh without _SLURM.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
export MH_STATE="${MH_STATE_SLURM:-${TMPDIR:-/tmp}/mpishard-slurm/state}"
export MH_PRE="${MH_PRE_SLURM:-hs}" MH_NET="${MH_NET_SLURM:-10.79.0}"

net() { "$here/netns.sh" "$@"; }

configure() {
    local nodes="$1" cpus="$2" etc="$MH_STATE/etc-slurm"
    mkdir -p "$etc"
    cat >"$etc/slurm.conf" <<C
ClusterName=kit
SlurmctldHost=node1
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
StateSaveLocation=/run/slurmctld
SlurmdSpoolDir=/run/slurmd
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmctldLogFile=$MH_STATE/slurmctld.log
SlurmdLogFile=$MH_STATE/slurmd.%h.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=${MPI_DEFAULT:-none}
ReturnToService=2
SlurmctldTimeout=60
SlurmdTimeout=${SLURMD_TIMEOUT:-20}
KillWait=${KILL_WAIT:-30}
OverTimeLimit=${OVER_TIME:-0}
InactiveLimit=0
SchedulerType=sched/backfill
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmdParameters=config_overrides
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SlurmdDebug=info
${EXTRA:-}
NodeName=node[2-$((nodes + 1))] CPUs=$cpus Sockets=1 CoresPerSocket=$cpus ThreadsPerCore=1 RealMemory=8000 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=${GRACE:-60}
PartitionName=urgent Nodes=ALL Default=NO MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
C
    cat >"$etc/cgroup.conf" <<C
CgroupPlugin=cgroup/v1
CgroupAutomount=no
ConstrainCores=no
ConstrainRAMSpace=no
C
}

start_slurmd() { net exec "$1" sh -c 'mkdir -p /run/slurmd; exec /usr/sbin/slurmd'; }

start_munge() {
    # The machine's own /etc stays as it is: only the host sees the new /etc/slurm.
    net exec "$1" sh -c "mkdir -p -m 755 /etc/slurm /run/munge &&
        mount --bind '$MH_STATE/etc-slurm' /etc/slurm &&
        munged --force --key-file='$MH_STATE/munge.key' --log-file=/run/munge/log \
            --seed-file=/run/munge/seed --pid-file=/run/munge/pid \
            --socket=/run/munge/munge.socket.2" 2>"$MH_STATE/munged.$1.err" && return
    cat "$MH_STATE/munged.$1.err" >&2
    return 1
}

up() {
    local nodes="${1:-2}" cpus="${2:-32}" i idle
    net up $((nodes + 1))
    configure "$nodes" "$cpus"
    if [ ! -f "$MH_STATE/munge.key" ]; then
        dd if=/dev/urandom of="$MH_STATE/munge.key" bs=128 count=1 status=none
        chmod 400 "$MH_STATE/munge.key"
    fi
    for ((i = 1; i <= nodes + 1; i++)); do start_munge "$i"; done
    net exec 1 sh -c 'mkdir -p /run/slurmctld; exec /usr/sbin/slurmctld -c'
    for ((i = 2; i <= nodes + 1; i++)); do start_slurmd "$i"; done
    for ((i = 0; i < 300; i++)); do
        idle="$(net exec 1 sinfo -h -N -o %t 2>/dev/null | grep -c '^idle$' || true)"
        [ "$idle" -lt $((2 * nodes)) ] || break # each node is in two partitions
        sleep 0.1
    done
    net exec 1 sinfo -N -l
}

mend() {
    local i count
    count="$(cat "$MH_STATE/count")"
    net exec 1 sh -c 'scancel --user=root; scancel --user=root --signal=KILL' 2>/dev/null || true
    net unshape
    for ((i = 2; i <= count; i++)); do
        net thaw "$i"
        net cable "$i" up
        runs_slurmd "$i" || start_slurmd "$i"
        net exec 1 scontrol update nodename="node$i" state=resume 2>/dev/null || true
    done
}

runs_slurmd() {
    local process
    for process in $(net pids "$1"); do
        [ "$(head -z -n 1 "/proc/$process/cmdline" 2>/dev/null | tr -d '\0')" != /usr/sbin/slurmd ] ||
            return 0
    done
    return 1
}

case "${1:-}" in
    up) up "${@:2}" ;;
    down) net down ;;
    login) net exec 1 "${@:2}" ;;
    slurmd) start_slurmd "$2" ;;
    mend) mend ;;
    '' | -h | --help) sed -n '2,15s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" ;;
    *) net "$@" ;;
esac
