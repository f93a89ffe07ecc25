# Removes from this machine's disk what an image must not hold, until the SSH session that runs this
# ends. provision/bake.py sets the variables before these lines: token, limit_s.
set -e
state=/run/spr-cluster
umask 077
mkdir -p -m 755 $state

# The slow part first, while the machine still has its keys.
rm -f /root/.*_history /home/*/.*_history
apt-get clean
rm -rf /var/lib/apt/lists/* /home/*/.cache/pip /root/.cache/pip
sync

# The session: the sshd process of this connection, which ends with it.
session=$$
until grep -q '^sshd' /proc/$session/comm; do
    session=$(awk '/^PPid/{print $2}' /proc/$session/status)
    [ "$session" -gt 1 ] || { echo 'not in an SSH session' >&2; exit 1; }
done

cat >$state/unseal <<'END'
# Restores what seal.sh removed. With a token, only for that seal; prints whether it is unbroken.
state=/run/spr-cluster
umask 077
exec 8>$state/seal-lock
flock 8
said=broken
if [ -e $state/sealed ] && { [ -z "$1" ] || [ "$(cat $state/sealed)" = "$1" ]; }; then
    said=unbroken
    # A file created meanwhile is newer than ours, and may be in the image.
    while read -r path; do [ ! -s "/$path" ] || said=broken; done <$state/taken
    tar -C / --skip-old-files -xpf $state/taken.tar
    [ -s /etc/machine-id ] || tar -C / --overwrite -xpf $state/taken.tar etc/machine-id
    rm -f $state/sealed $state/taken $state/taken.tar
fi
echo $said
END

# First restore what an earlier run's seal removed.
systemctl stop spr-cluster-seal.service 2>/dev/null || true
sh $state/unseal >/dev/null
exec 8>$state/seal-lock
flock 8
{
    ls -d /etc/machine-id /etc/ssh/ssh_host_* /etc/munge/munge.key || true
    # Each machine has its own authorized keys: cloud-init writes them from its key pair.
    ls -d /home/*/.ssh/authorized_keys /root/.ssh/authorized_keys || true
    grep -ls 'PRIVATE KEY-----' /home/*/.ssh/* /root/.ssh/* || true
    # Credentials of a user's other accounts.
    for home in /home/* /root; do
        find "$home"/{.aws,.kaggle,.netrc,.git-credentials,.docker/config.json} \
            "$home"/.cache/huggingface/{token,stored_tokens} -type f 2>/dev/null || true
    done
} | sed 's|^/||' >$state/taken
tar -C / -cpf $state/taken.tar -T $state/taken
echo "$token" >$state/sealed
# It restores everything when the session ends, after limit_s at the latest, and at a shutdown.
systemd-run --quiet --collect --unit=spr-cluster-seal \
    --property="ExecStopPost=/bin/sh $state/unseal" \
    timeout "$limit_s" tail --pid="$session" -s 1 -f /dev/null 8>&-
: >/etc/machine-id
# The disk is copied block by block: deleted files would still be in the copy.
grep -vx etc/machine-id $state/taken | (cd / && xargs -d '\n' shred -u -n 1)
exec 8>&-
sync
