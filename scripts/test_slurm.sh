#!/usr/bin/env bash
# Runs train.sbatch and the pages' commands on a real SLURM of two nodes: see --help.
set -euo pipefail
. "$(dirname -- "${BASH_SOURCE[0]}")/environment.sh"

usage() {
    cat <<'EOF2'
usage: scripts/test_slurm.sh [CHECK..]

Installs SLURM where apt-get does, starts it on three hosts made of Linux namespaces (a login node
and two compute nodes), and runs there examples/slurm/train.sbatch, mpishard doctor and mpishard
run, with MPICH and Open MPI: to the end, preempted, requeued, with a killed rank, with a lost node.
SLURM and its hosts are removed at the end. Takes about three minutes; needs Linux and root.

    plugins doctor complete preempted capped killed array node restarts    the checks; default: all

KEEP=1 keeps the jobs' outputs. Without root it prints that and tests nothing; the exit code is 0.
EOF2
}

case "${1:-}" in -h | --help) usage && exit ;; esac

if [ "$(id -u)" != 0 ]; then
    say 'skipped: network namespaces need root, so nothing was tested'
    exit
fi
packages=''
for each in slurmd:slurm-wlm munged:munge sshd:openssh-server ethtool:ethtool ip:iproute2; do
    PATH="$PATH:/usr/sbin:/sbin" command -v "${each%:*}" >/dev/null || packages+=" ${each#*:}"
done
# Debian's plugin pmix opens a library that no other package has.
ldconfig -p | grep -q libpmix.so || packages+=' libpmix-dev'
if [ -n "$packages" ]; then
    command -v apt-get >/dev/null || refuse "needs$packages, and there is no apt-get"
    say "installing$packages"
    # shellcheck disable=SC2086 # one word per package
    DEBIAN_FRONTEND=noninteractive apt-get install --quiet --yes --no-install-recommends $packages \
        >/dev/null || refuse 'the installation failed, for the reason above' "apt-get install$packages"
fi

prepare_environment mpi plot fast test dev
prepare_openmpi
cd -- "$root"
exec tests/hosts/slurm_checks.sh "$@"
