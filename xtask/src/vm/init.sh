#!/bin/sh
# The first process of a guest: makes the system that tests expect, runs them, and switches the guest off.
export PATH=/bin:/sbin HOME=/tmp
for mount in proc:/proc sysfs:/sys devtmpfs:/dev tmpfs:/run; do
    mount -t "${mount%%:*}" none "${mount#*:}"
done
mkdir -p /run/netns
mount -t cgroup2 none /sys/fs/cgroup
mount -t bpf bpf /sys/fs/bpf
# Tests talk on a line of their own: the kernel's messages would break theirs in two.
exec >/dev/ttyS1 2>&1
# Whoever started this guest may be gone by then.
(sleep "$GUEST_LIMIT"; poweroff -f) &
# Programs would complain, each, until there is some randomness.
head -c 1 /dev/random >/dev/null
for module in $(cat /modules/order); do
    insmod "/modules/$module.ko" || echo "module $module cannot be loaded"
done
ip link set lo up
ulimit -n 65536
. /programs/run
# The line is slower than this script.
sleep 1
poweroff -f
