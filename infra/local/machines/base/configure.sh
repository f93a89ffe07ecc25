#!/bin/sh
# Turns a plain Debian or Ubuntu root file system into the embedded cloud's base image.
# Runs once, as root, inside it; the other files of this folder lie beside it.
set -eu
here=$(dirname "$0")
. /etc/os-release

if ! dpkg -s @PACKAGES@ >/dev/null 2>&1; then
    export DEBIAN_FRONTEND=noninteractive
    apt-get -q update
    apt-get -q install -y --no-install-recommends @PACKAGES@
    apt-get clean
    rm -rf /var/lib/apt/lists/*
fi

sed "s/@DISTRO@/$ID/" "$here/cloud.cfg" >/etc/cloud/cloud.cfg
# Of the distribution's own settings only those of the log files.
find /etc/cloud/cloud.cfg.d -name '*.cfg' ! -name 05_logging.cfg -delete
# One source of data, known beforehand: nothing to search for.
echo 'datasource: NoCloud' >/etc/cloud/ds-identify.cfg
install -D -m 644 "$here/sshd.conf" /etc/ssh/sshd_config.d/10-embedded-cloud.conf
# Python's requests and httpx bring their own list of authorities; this is the machine's, which the host's is
# mounted over. The machines share the host's CPUs: threads of OpenMP that wait must not spin.
cat >>/etc/environment <<'VARIABLES'
SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt
REQUESTS_CA_BUNDLE=/etc/ssl/certs/ca-certificates.crt
GOMP_SPINCOUNT=0
VARIABLES
install -D -m 644 "$here/metadata.sh" /usr/local/lib/embedded-cloud/metadata.sh
install -m 644 "$here/metadata.socket" "$here/metadata@.service" /etc/systemd/system/
systemctl enable metadata.socket >/dev/null 2>&1

# OpenSSL's own default file, so that every program on the node trusts what the host trusts.
ln -sf /etc/ssl/certs/ca-certificates.crt /usr/lib/ssl/cert.pem
# The host's list is mounted over this package's; an upgrade could not replace it.
apt-mark hold ca-certificates >/dev/null

# The ubuntu user comes from cloud-init, with the key of the launch, as on EC2.
if id ubuntu >/dev/null 2>&1; then userdel --remove ubuntu; fi

# Slurm's services start once a node is connected; they have no configuration before.
systemctl disable munge.service slurmctld.service slurmd.service >/dev/null 2>&1
systemctl disable ssh.socket ssh.service >/dev/null 2>&1 || true
ssh=ssh.service
[ "$VERSION_CODENAME" != trixie ] || ssh=ssh.socket
systemctl enable $ssh cloud-init-local.service cloud-init.service cloud-config.service \
    cloud-final.service >/dev/null 2>&1 || systemctl enable $ssh cloud-init-local.service \
    cloud-init-main.service cloud-init-network.service cloud-config.service cloud-final.service
# What only costs time in a container, or waits for devices that it does not have.
systemctl mask getty@.service console-getty.service systemd-networkd.service \
    systemd-networkd-wait-online.service systemd-resolved.service systemd-timesyncd.service \
    systemd-pstore.service systemd-udevd.service cloud-init-hotplugd.socket \
    apt-daily.timer apt-daily-upgrade.timer dpkg-db-backup.timer fstrim.timer e2scrub_all.timer \
    motd-news.timer ua-timer.timer man-db.timer >/dev/null 2>&1
# A service that hangs must not hold up a shutdown until podman's patience ends.
mkdir -p /etc/systemd/system.conf.d
printf '[Manager]\nDefaultTimeoutStopSec=5s\n' >/etc/systemd/system.conf.d/embedded-cloud.conf
systemctl set-default multi-user.target >/dev/null

# Every instance makes its own of these.
rm -f /etc/ssh/ssh_host_* /etc/munge/munge.key
: >/etc/machine-id
rm -rf /var/lib/cloud/* /var/log/*.log /var/cache/apt/*.bin
