#!/bin/sh
# Installs the embedded cloud's missing system packages (Debian and Ubuntu, as root).
set -eu

missing=""
need() { # need COMMAND PACKAGE
    command -v "$1" >/dev/null 2>&1 || [ -x "/usr/lib/podman/$1" ] || [ -x "/usr/libexec/podman/$1" ] || missing="$missing $2"
}
need podman podman
need runc runc
need netavark netavark
need aardvark-dns aardvark-dns
need iptables iptables
need mmdebstrap mmdebstrap
need ssh openssh-client
need rsync rsync
need ip iproute2
python3 -c 'import ensurepip' 2>/dev/null || missing="$missing python3-venv"
[ -z "$missing" ] && exit 0

if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "the embedded cloud needs$missing: install them as root, then run this again" >&2
    exit 1
fi
echo "installing$missing"
export DEBIAN_FRONTEND=noninteractive
apt="apt-get -qq -o DPkg::Lock::Timeout=600 -o Acquire::Retries=5"
$apt update
# shellcheck disable=SC2086
$apt install -y --no-install-recommends $missing >/dev/null
