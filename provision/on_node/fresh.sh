# First boot: a copy of another machine removes that one's cluster keys, authorized keys, and queue.
# cloud-init then writes the keys of this machine's owner.
if [ ! -e /var/lib/cloud/instance/spr-cluster-fresh ]; then
    rm -f /root/.ssh/authorized_keys /home/*/.ssh/authorized_keys /home/*/.ssh/spr-cluster* \
        /home/*/.ssh/known_hosts /home/*/.ssh/config /home/*/hosts \
        /etc/slurm/slurm.conf /etc/munge/munge.key
    rm -rf /var/spool/spr-cluster-slurm
    # In place: a mounted file can't be replaced.
    sed '/^# spr-cluster begin$/,/^# spr-cluster end$/d' /etc/hosts >/run/spr-cluster/hosts &&
        cat /run/spr-cluster/hosts >/etc/hosts
    touch /var/lib/cloud/instance/spr-cluster-fresh
fi
