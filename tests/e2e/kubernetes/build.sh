#!/bin/bash
# Builds Kubernetes 1.20.2 from Debian's source package, once: the control plane, and a node's kubelet.
#
#   tests/e2e/kubernetes/build.sh [FOLDER]     default: ~/.cache/spr-cluster/kubernetes-1.20.2
#
# etcd, containerd, the network plugins, and Go are unpacked there, too: nothing is installed.
# Debian 12; about 6 minutes at low priority on two cores. The programs, 460 MB, stay; sources and Go
# are deleted.
set -euo pipefail

root=$(realpath --canonicalize-missing "${1:-${XDG_CACHE_HOME:-$HOME/.cache}/spr-cluster/kubernetes-1.20.2}")
programs=(kube-apiserver kube-controller-manager kube-scheduler kubelet kubectl)
unpacked=(bin/etcd bin/containerd bin/containerd-shim-runc-v2 bin/ctr lib/cni/bridge lib/cni/host-local lib/cni/loopback)
version=k8s.io/kubernetes/vendor/k8s.io/component-base/version

is_built() {
    local each
    for each in "${unpacked[@]##*/}" pause "${programs[@]}"; do [ -x "$root/bin/$each" ] || return 1; done
}

apt() {
    apt-get -qq -o Acquire::Retries=5 -o APT::Sandbox::User=root \
        -o Dir::Etc::SourceList="$root/apt/sources.list" -o Dir::Etc::SourceParts=/dev/null \
        -o Dir::State::Lists="$root/apt/lists" -o Dir::Cache="$root/apt/cache" "$@"
}

# Packages come from a list with deb-src lines; the system's own list stays as it is.
download() {
    local signed="[signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian"
    rm -rf "$root/packages"
    mkdir -p "$root/apt/lists/partial" "$root/apt/cache/archives/partial" "$root/packages"
    printf 'deb %s bookworm main\ndeb-src %s bookworm main\n' "$signed" "$signed" >"$root/apt/sources.list"
    apt update
    cd "$root/packages"
    apt download etcd-server containerd containernetworking-plugins golang-1.19-go golang-1.19-src golang-github-modern-go-reflect2-dev
    apt source --download-only kubernetes
    local each
    for each in *.deb; do dpkg-deb -x "$each" "$root/unpacked"; done
}

unpack() {
    rm -rf "$root/gopath"
    mkdir -p "$root/gopath/src/k8s.io"
    # apt has verified the archive's signature, and with it this file's checksum.
    dpkg-source --no-check -x "$root"/packages/kubernetes_*.dsc "$tree" >/dev/null
    # The vendored release crashes with Go 1.18 and newer.
    rm -rf "$tree/vendor/github.com/modern-go/reflect2"
    cp -r "$root/unpacked/usr/share/gocode/src/github.com/modern-go/reflect2" "$tree/vendor/github.com/modern-go/"
}

# The source has everything that is generated but this file, without which the server does not compile.
generate() {
    cd "$tree"
    go build -p 2 -o "$root/bin/openapi-gen" ./vendor/k8s.io/kube-openapi/cmd/openapi-gen
    local packages
    packages=$(grep -Rl --include='*.go' '+k8s:openapi-gen=' cmd pkg plugin vendor/k8s.io |
        grep -vE 'vendor/k8s.io/(code-generator|sample-apiserver|kube-openapi|gengo)/|/testdata/' |
        xargs -n1 dirname | LC_ALL=C sort -u | sed 's,^,k8s.io/kubernetes/,' | paste -sd,)
    "$root/bin/openapi-gen" --logtostderr -i "$packages" -p k8s.io/kubernetes/pkg/generated/openapi \
        -O zz_generated.openapi -h vendor/k8s.io/code-generator/hack/boilerplate.go.txt -r "$root/violations"
}

compile() {
    local each
    cd "$tree"
    for each in "${programs[@]}"; do
        [ -x "$root/bin/$each" ] && continue
        echo "  $each"
        timeout 3600 go build -p 2 -o "$root/bin/$each" \
            -ldflags "-s -w -X $version.gitVersion=v1.20.2 -X $version.gitMajor=1 -X $version.gitMinor=20" \
            "./cmd/$each"
    done
    # What holds a pod's network while its containers come and go.
    gcc -Os -static -o "$root/bin/pause" build/pause/linux/pause.c
    cp "${unpacked[@]/#/$root/unpacked/usr/}" "$root/bin/"
}

is_built && exit 0
for each in apt-get dpkg-source; do
    command -v "$each" >/dev/null && continue
    echo "Kubernetes is built on Debian 12 only, with apt-get and dpkg-source: apt-get install dpkg-dev" >&2
    exit 1
done
mkdir -p "$root/bin"
# Two builds at once would share one folder.
exec 9>"$root/lock"
flock -w 3600 9
is_built && exit 0
renice -n 19 $$ >/dev/null
tree=$root/gopath/src/k8s.io/kubernetes
export GOROOT=$root/unpacked/usr/lib/go-1.19 GOPATH=$root/gopath GOCACHE=$root/gocache
export GO111MODULE=off CGO_ENABLED=0 GOFLAGS='' PATH=$root/unpacked/usr/lib/go-1.19/bin:$PATH
echo "building Kubernetes 1.20.2 in $root (once; about 6 minutes)"
echo "  download" && download
echo "  source" && unpack
echo "  openapi-gen" && generate
compile
chmod -R u+w "$root"
rm -rf "$root"/{apt,packages,unpacked,gopath,gocache,violations,bin/openapi-gen}
echo "  done: $root/bin"
