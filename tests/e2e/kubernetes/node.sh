#!/bin/bash
# A node: containerd and kubelet, which end with this process. To be run in its own namespaces:
#
#   unshare --mount --pid --kill-child --mount-proc node.sh PROGRAMS FOLDER IMAGES KUBELET_OPTION...
set -euo pipefail

PATH=$1:$PATH
folder=$2
images=$3
shift 3
# These paths are fixed in kubelet.
for each in /var/lib/kubelet /var/log; do mount -t tmpfs tmpfs "$each"; done
# kubelet changes what the kernel does when memory is used up and after a panic; here, it changes files.
for each in vm/{overcommit_memory,panic_on_oom} kernel/{panic,panic_on_oops,keys/root_maxkeys,keys/root_maxbytes}; do
    file=$folder/${each//\//-}
    cat "/proc/sys/$each" >"$file"
    mount --bind "$file" "/proc/sys/$each"
done
containerd --config "$folder/containerd.toml" >"$folder/containerd.log" 2>&1 &
for _ in {1..100}; do
    [ -S "$folder/containerd.sock" ] && break
    sleep 0.1
done
ctr --address "$folder/containerd.sock" --namespace k8s.io images import "$images"
kubelet --container-runtime=remote --container-runtime-endpoint="unix://$folder/containerd.sock" "$@" \
    >"$folder/kubelet.log" 2>&1 &
# As the first process of its namespace, it also inherits what the containers leave.
wait -n
