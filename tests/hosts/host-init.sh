#!/usr/bin/env bash
# The first process of a host: what is the host's own, its sshd, and then it reaps orphans. See netns.sh.
set -euo pipefail
hostname "$1"
mount --make-rprivate /
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
# /tmp is the host's own, but for the folders of $MH_KEEP, which all hosts see as on a shared file system.
new=/dev/shm/tmp
mkdir "$new"
mount -t tmpfs -o mode=1777 tmpfs "$new"
for keep in ${MH_KEEP:-}; do
    case "$keep" in /tmp/*) mkdir -p "$new/${keep#/tmp/}"; mount --bind "$keep" "$new/${keep#/tmp/}" ;; esac
done
mount --move "$new" /tmp
rmdir "$new"
mount -t tmpfs -o mode=755 tmpfs /run
mkdir -p /run/sshd
mount --bind "$MH_STATE/hosts" /etc/hosts
mount --bind "$MH_STATE/ssh/config" /etc/ssh/ssh_config
[ ! -d ~/.ssh ] || mount -t tmpfs -o mode=700 tmpfs ~/.ssh
config="$MH_STATE/sshd_config"
unset MH_STATE
cd /
env -i PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin LANG=C.UTF-8 /usr/sbin/sshd -f "$config"
set +e
while :; do sleep 3600 & wait $!; done
