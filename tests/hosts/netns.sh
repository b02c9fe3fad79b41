#!/usr/bin/env bash
# Hosts made of Linux namespaces, joined by a bridge that nothing else is on: several machines on one.
#
#   netns.sh up N             hosts node1 .. nodeN at 10.77.0.1 .. N, each with its own network, hostname, IPC, PIDs,
#                             /dev/shm, /tmp and /run, and an sshd; the file system is shared, as on a cluster
#   netns.sh down             ends all their processes (and no other) and removes all
#   netns.sh exec I CMD..     runs CMD on host I
#   netns.sh pids I           the processes of host I, as this machine numbers them
#   netns.sh freeze|thaw I    SIGSTOP | SIGCONT to all of them
#   netns.sh kill I [NAME]    SIGKILL to all of them but init [whose command line matches NAME]
#   netns.sh sshd I           start its sshd again, where that was killed
#   netns.sh cable I down|up  pull or plug the cable of host I (at the switch: the host's own interface loses its carrier)
#   netns.sh shape RATE [DELAY_MS [LOSS_PERCENT]]   all links: RATE such as 10gbit, 1gbit, 100mbit, or 0 for as fast as it goes;
#                             with a delay or loss frames go through wire.c (this kernel may lack netem)
#   netns.sh mend             plug, thaw and unshape all hosts, and end and remove what jobs have left on them
#   netns.sh bytes            bytes that each host has sent since it came up (ip -s link: with Ethernet, IP and TCP headers)
#   netns.sh status
#
# Needs root (CAP_SYS_ADMIN, CAP_NET_ADMIN, CAP_NET_RAW), iproute2, openssh-server, util-linux; gcc for delay and loss.
# Several sets of hosts at once have their own MH_PRE (names of the network namespaces), MH_NET (first three numbers of the
# addresses) and MH_STATE (a temporary folder, which all hosts see). MH_KEEP names folders below /tmp that all hosts share.
# PIN=1: host I has core (I-1) mod C alone. DECOY=1: each host has docker0 with one and the same address 172.17.0.1.
# SAMENAME=1: all hosts have one hostname.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
pre="${MH_PRE:-mh}"
state="${MH_STATE:-${TMPDIR:-/tmp}/mpishard-hosts-$(id -u)-$pre}"
net="${MH_NET:-10.77.0}"

sw() { ip netns exec "$pre-sw" "$@"; }
hosts() { cat "$state/count" 2>/dev/null || echo 0; }
init_of() {
    local pid
    pid="$(cat "$state/init$1")"
    grep -q host-init "/proc/$pid/cmdline" || { echo "host $1 has ended" >&2; return 1; }
    echo "$pid"
}
# The state may be that of a run that died long ago: its numbers may be other processes now.
end() { ! grep -qE "$2" "/proc/$1/cmdline" 2>/dev/null || kill -KILL "$1" 2>/dev/null || true; }

up() {
    local n="$1" i
    [ ! -e "$state/count" ] || { echo "already up ($(hosts) hosts): down first" >&2; exit 1; }
    mkdir -p "$state/ssh"
    chmod 700 "$state" "$state/ssh"
    [ -f "$state/ssh/id_ed25519" ] || ssh-keygen -q -t ed25519 -N '' -f "$state/ssh/id_ed25519"
    [ -f "$state/hostkey" ] || ssh-keygen -q -t ed25519 -N '' -f "$state/hostkey"
    cp "$state/ssh/id_ed25519.pub" "$state/ssh/authorized_keys"
    # As the system's settings and not the user's, so that nothing is made in the home folder.
    printf 'Host *\n  IdentityFile %s\n  IdentitiesOnly yes\n  StrictHostKeyChecking no\n  UserKnownHostsFile /dev/null\n  LogLevel ERROR\n' \
        "$state/ssh/id_ed25519" >"$state/ssh/config"
    chmod 600 "$state/ssh/"*
    printf 'Port 22\nHostKey %s\nAuthorizedKeysFile %s\nUsePAM no\nPermitRootLogin prohibit-password\nPasswordAuthentication no\nStrictModes no\nUseDNS no\nMaxStartups 100\nMaxSessions 100\nPidFile /run/sshd.pid\n' \
        "$state/hostkey" "$state/ssh/authorized_keys" >"$state/sshd_config"
    { echo '127.0.0.1 localhost'; for ((i = 1; i <= n; i++)); do echo "$net.$i node$i"; done; } >"$state/hosts"
    echo "$n" >"$state/count"
    ip netns add "$pre-sw"
    sw ip link set lo up
    sw ip link add br0 type bridge forward_delay 0 stp_state 0 mcast_snooping 0
    sw ip link set br0 up
    for ((i = 1; i <= n; i++)); do
        ip netns add "$pre$i"
        ip link add "p$i" netns "$pre-sw" type veth peer name eth0 netns "$pre$i"
        sw ip link set "p$i" master br0 up
        ip netns exec "$pre$i" ip link set eth0 address "$(printf '02:77:00:00:00:%02x' "$i")"
        ip netns exec "$pre$i" ip link set lo up
        ip netns exec "$pre$i" ip addr add "$net.$i/24" dev eth0
        ip netns exec "$pre$i" ip link set eth0 up
        # This machine has bbr, most have cubic, which a namespace may not choose by itself: reno is near it on a short cable.
        ip netns exec "$pre$i" sysctl -qw net.ipv4.tcp_congestion_control="${CC:-reno}" || true
        if [ -n "${DECOY:-}" ]; then
            ip netns exec "$pre$i" ip link add docker0 type bridge
            ip netns exec "$pre$i" ip addr add 172.17.0.1/16 dev docker0
            ip netns exec "$pre$i" ip link set docker0 up
        fi
        local name="node$i" pin=()
        [ -z "${SAMENAME:-}" ] || name=localnode
        [ -z "${PIN:-}" ] || pin=(taskset -c "$(((i - 1) % $(nproc --all)))")
        rm -f "$state/init$i"
        MH_STATE="$state" MH_KEEP="${MH_KEEP:-} $state" setsid ip netns exec "$pre$i" "${pin[@]}" unshare --uts --ipc --mount --pid --fork --mount-proc --kill-child \
            "$here/host-init.sh" "$name" </dev/null >"$state/log$i" 2>&1 &
        echo $! >"$state/outer$i"
    done
    for ((i = 1; i <= n; i++)); do
        local tries=0 child=''
        until [ -e "$state/ready-$i" ] || [ $tries -gt 100 ]; do
            child="$(pgrep -P "$(cat "$state/outer$i")" | head -1 || true)"
            # unshare forks: the init of the PID namespace is its child
            if [ -n "$child" ] && nsenter -t "$child" -n -p -m -- bash -c 'exec 3<>/dev/tcp/127.0.0.1/22' 2>/dev/null; then
                echo "$child" >"$state/init$i"
                touch "$state/ready-$i"
            else
                sleep 0.05
                tries=$((tries + 1))
            fi
        done
        [ -e "$state/ready-$i" ] || { echo "host $i did not come up:"; cat "$state/log$i"; exit 1; } >&2
    done
}

down() {
    local n i
    n="$(hosts)"
    [ ! -e "$state/wire.pid" ] || end "$(cat "$state/wire.pid")" /wire
    for ((i = 1; i <= n; i++)); do
        # The end of a PID namespace's first process is the end of all in it.
        [ ! -s "$state/init$i" ] || end "$(cat "$state/init$i")" host-init
        [ ! -s "$state/outer$i" ] || end "$(cat "$state/outer$i")" host-init
    done
    sleep 0.2
    for ((i = 1; i <= n; i++)); do ip netns del "$pre$i" 2>/dev/null || true; done
    ip netns del "$pre-sw" 2>/dev/null || true
    rm -f "$state"/{count,wire.pid,shaped,init*,outer*,ready-*,log*}
}

enter() {
    local i="$1"
    shift
    # --wd: the working directory of the caller, if the host has it
    exec nsenter -t "$(init_of "$i")" -n -u -i -p -m --wd="$PWD" -- env -u SSH_AUTH_SOCK "$@"
}

pids() { # all processes whose PID namespace is that of the host
    local ns
    ns="$(stat -Lc %i "/proc/$(init_of "$1")/ns/pid")"
    { stat -Lc '%i/%n' /proc/[0-9]*/ns/pid 2>/dev/null || true; } | awk -F / -v ns="$ns" '$1 == ns { print $4 }'
}

mend() {
    local i p
    unshape
    for ((i = 1; i <= $(hosts); i++)); do
        sw ip link set "p$i" up
        pids "$i" | xargs -r kill -CONT 2>/dev/null || true
        for p in $(pids "$i"); do
            case "$(tr '\0' ' ' 2>/dev/null <"/proc/$p/cmdline" || true)" in
                *host-init* | *'[listener]'* | 'sleep 3600 '* | '') ;;
                *) kill -KILL "$p" 2>/dev/null || true ;;
            esac
        done
        (enter "$i" bash -c "(exec 3<>/dev/tcp/127.0.0.1/22) 2>/dev/null || /usr/sbin/sshd -f '$state/sshd_config'
            rm -rf /dev/shm/* /tmp/hydra_* /tmp/prted.* /tmp/mpishard-job-* /tmp/ompi.*" 2>/dev/null) || true
    done
}

unshape() {
    local i
    [ -e "$state/shaped" ] || return 0
    if [ -e "$state/wire.pid" ]; then kill "$(cat "$state/wire.pid")" 2>/dev/null || true; rm -f "$state/wire.pid"; fi
    for ((i = 1; i <= $(hosts); i++)); do
        sw tc qdisc del dev "p$i" root 2>/dev/null || true
        sw ip link set "p$i" master br0
        ip netns exec "$pre$i" tc qdisc del dev eth0 root 2>/dev/null || true
        ip netns exec "$pre$i" ethtool -K eth0 tso on gso on gro on >/dev/null 2>&1 || true
    done
    rm "$state/shaped"
}

shape() {
    local rate="$1" delay="${2:-0}" loss="${3:-0}" i ports=()
    unshape
    touch "$state/shaped"
    if [ "$delay" = 0 ] && [ "$loss" = 0 ]; then
        [ "$rate" != 0 ] || return 0
        for ((i = 1; i <= $(hosts); i++)); do
            # Both ends of each cable: what a host sends, and what comes to it from all others.
            ip netns exec "$pre$i" tc qdisc add dev eth0 root tbf rate "$rate" burst 128kb limit 4mb
            sw tc qdisc add dev "p$i" root tbf rate "$rate" burst 128kb limit 4mb
        done
        return
    fi
    [ "$state/wire" -nt "$here/wire.c" ] || gcc -O2 -Wall -o "$state/wire" "$here/wire.c"
    for ((i = 1; i <= $(hosts); i++)); do
        sw ip link set "p$i" nomaster
        sw ip link set "p$i" promisc on
        ports+=("p$i")
        # A lost frame is one packet, not 64 KiB of them.
        [ "$loss" = 0 ] || ip netns exec "$pre$i" ethtool -K eth0 tso off gso off gro off >/dev/null
    done
    setsid ip netns exec "$pre-sw" "$state/wire" "$rate" "$delay" "$loss" "${ports[@]}" </dev/null >"$state/log-wire" 2>&1 &
    echo $! >"$state/wire.pid"
    sleep 0.3
    kill -0 "$(cat "$state/wire.pid")" || { cat "$state/log-wire"; exit 1; }
}

case "${1:-}" in
    up) up "${2:?number of hosts}" ;;
    down) down ;;
    exec) shift; enter "$@" ;;
    pids) pids "$2" ;;
    freeze) pids "$2" | xargs -r kill -STOP ;;
    thaw) pids "$2" | xargs -r kill -CONT ;;
    kill)
        for p in $(pids "$2"); do
            [ "$p" != "$(init_of "$2")" ] || continue
            if [ -z "${3:-}" ] || tr '\0' ' ' <"/proc/$p/cmdline" 2>/dev/null | grep -qE -- "$3"; then kill -KILL "$p" 2>/dev/null || true; fi
        done ;;
    sshd) [ -n "$(pids "$2" | while read -r p; do tr '\0' ' ' <"/proc/$p/cmdline" 2>/dev/null | grep -F '[listener]'; done)" ] || enter "$2" /usr/sbin/sshd -f "$state/sshd_config" ;;
    cable) sw ip link set "p$2" "$3" ;;
    shape) shape "${@:2}" ;;
    unshape) unshape ;;
    mend) mend ;;
    bytes) for ((i = 1; i <= $(hosts); i++)); do echo "node$i $(ip netns exec "$pre$i" cat /sys/class/net/eth0/statistics/tx_bytes)"; done ;;
    status) echo "$(hosts) hosts"; for ((i = 1; i <= $(hosts); i++)); do echo "node$i init $(init_of "$i"), $(pids "$i" | wc -l) processes"; done ;;
    *) sed -n '2,27p' "${BASH_SOURCE[0]}"; exit 2 ;;
esac
