#!/usr/bin/env bash
# Runs a Python script on N ranks, each on a simulated host behind a slow link: see --help.
set -euo pipefail

usage() {
    cat <<'EOT'
usage: benchmarks/slow_link.sh N MBIT PYTHON SCRIPT [ARGUMENT ...]

Makes N network namespaces, joined by a bridge through links of MBIT Mbit/s in each direction, and starts one
rank of SCRIPT in each, with the mpiexec (MPICH's) that is beside PYTHON. It needs root, `ip` and `tc`, and
removes the namespaces at the end.
EOT
}

[ $# -ge 4 ] || { usage; exit 2; }
ranks=$1 rate=$2 python=$3
shift 3
tag="slow$$"
folder=$(mktemp -d)
finish() {
    for name in $(ip netns list | awk -v tag="$tag" 'index($1, tag) == 1 {print $1}'); do
        ip netns delete "$name"
    done
    rm -r -- "$folder"
}
trap finish EXIT

ip netns add "$tag"
ip -n "$tag" link set lo up
ip -n "$tag" link add bridge type bridge
ip -n "$tag" address add 10.77.0.254/24 dev bridge
ip -n "$tag" link set bridge up
hosts=()
for ((i = 1; i <= ranks; i++)); do
    ip netns add "$tag-$i"
    ip -n "$tag" link add "port$i" type veth peer name eth0 netns "$tag-$i"
    ip -n "$tag" link set "port$i" master bridge up
    ip -n "$tag-$i" address add "10.77.0.$i/24" dev eth0
    ip -n "$tag-$i" link set lo up
    ip -n "$tag-$i" link set eth0 up
    # Both directions: out of the host, and into it.
    ip netns exec "$tag-$i" tc qdisc add dev eth0 root tbf rate "${rate}mbit" burst 64kb latency 100ms
    ip netns exec "$tag" tc qdisc add dev "port$i" root tbf rate "${rate}mbit" burst 64kb latency 100ms
    hosts+=("10.77.0.$i")
done

# mpiexec calls this program instead of ssh: HOST COMMAND...
cat >"$folder/launch" <<EOT
#!/usr/bin/env bash
while [ "\${1#-}" != "\$1" ]; do shift; done
host=\$1
shift
exec ip netns exec "$tag-\${host##*.}" unshare --uts sh -c "hostname host\${host##*.}; \$*"
EOT
chmod +x "$folder/launch"
FI_PROVIDER=tcp UCX_TLS=tcp,self OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1 ip netns exec "$tag" \
    "$(dirname -- "$python")/mpiexec" -launcher ssh -launcher-exec "$folder/launch" \
    -localhost 10.77.0.254 -hosts "$(IFS=,; echo "${hosts[*]}")" -n "$ranks" -ppn 1 "$python" "$@"
