#!/bin/busybox sh
# The guest's first process: mounts the host's root read-only, runs the command that the host left
# in the shared folder, stores its exit status there, and switches the machine off.
export PATH=/bin
for name in mount insmod mkdir chroot cat poweroff sync ifconfig; do
  /bin/busybox ln -s busybox /bin/$name
done

mount -t proc proc /proc
while read -r module; do insmod /modules/$module; done </modules/order

mount -t 9p -o trans=virtio,version=9p2000.L,ro,cache=loose,msize=512000 hostroot /host
mount -t proc proc /host/proc
mount -t sysfs sysfs /host/sys
mount -t devtmpfs devtmpfs /host/dev
mkdir -p /host/dev/pts /host/dev/shm
mount -t devpts devpts /host/dev/pts
mount -t tmpfs tmpfs /host/dev/shm
mkdir /hidden
mount -o bind /host/tmp /hidden
mount -t tmpfs tmpfs /host/tmp
mount -t tmpfs tmpfs /host/run
mkdir /host/run/flashwarp
mount -t 9p -o trans=virtio,version=9p2000.L,cache=none,msize=262144 share /host/run/flashwarp
ifconfig lo 127.0.0.1 up

# A checkout that lies below /tmp keeps its place.
root=$(cat /host/run/flashwarp/root)
case $root in /tmp/*)
  mkdir -p /host$root
  mount -o bind /hidden${root#/tmp} /host$root
  ;;
esac

chroot /host /bin/sh /run/flashwarp/command </host/dev/null >/host/run/flashwarp/output 2>&1
status=$?
sync
echo $status >/host/run/flashwarp/status
poweroff -f
