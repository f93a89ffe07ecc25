# The first boot of a machine: a copy of another one forgets how to enter that one's cluster, and
# who may enter it. cloud-init writes the keys of this machine's own owner afterwards.
if [ ! -e /var/lib/cloud/instance/spr-cluster-fresh ]; then
    rm -f /root/.ssh/authorized_keys /home/*/.ssh/authorized_keys /home/*/.ssh/spr-cluster* \
        /home/*/.ssh/known_hosts /home/*/.ssh/config /home/*/hosts
    # In place: it may be mounted, and then it can't be replaced.
    sed '/^# spr-cluster begin$/,/^# spr-cluster end$/d' /etc/hosts >/run/spr-cluster/hosts &&
        cat /run/spr-cluster/hosts >/etc/hosts
    touch /var/lib/cloud/instance/spr-cluster-fresh
fi
