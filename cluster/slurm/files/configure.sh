# Configures Slurm on a node, as root, and starts it; the other files of this folder lie beside it.
set -e
cd "$(dirname "$0")"
umask 022
conf=/etc/slurm/slurm.conf
state=/var/spool/spr-cluster-slurm
if [ -e $conf ]; then
    # A machine that takes over another one's name must not inherit that it was drained.
    moved=$(grep '^# node' $conf | while read -r _ name machine; do
        grep "^# $name " slurm.conf | grep -v " $machine$"
    done || true)
    if [ -n "$moved" ]; then
        systemctl stop slurmctld
        rm -f $state/node_state*
    fi
fi
for unit in munge slurmctld slurmd; do
    install -D -m 644 $unit.conf /etc/systemd/system/$unit.service.d/spr-cluster.conf
done
install -D -m 644 slurm.conf $conf
install -m 755 epilog.sh /etc/slurm/spr-cluster-epilog
install -m 755 health.sh /etc/slurm/spr-cluster-health
install -m 755 task_prolog.sh /etc/slurm/spr-cluster-task-prolog
install -m 644 limits.py /etc/slurm/spr-cluster-limits
install -m 644 cores.json /etc/slurm/spr-cluster-cores
rm -rf /run/spr-cluster-health
# Where Ubuntu 20.04's Slurm looks.
[ ! -d /etc/slurm-llnl ] || ln -sfn $conf /etc/slurm-llnl/slurm.conf
install -d -o slurm -g slurm $state
# Data, models, and the variables of programs are none of other users' business.
install -d -o ubuntu -g ubuntu -m 700 /home/ubuntu/spr-jobs
# Otherwise, logind deletes the shared memory of a user's jobs when the last SSH session ends (RemoveIPC).
install -D -m 644 /dev/null /var/lib/systemd/linger/ubuntu
install -o munge -g munge -m 400 munge.key /etc/munge/munge.key
# Unlike `enable`, it takes no second for the packages' init scripts. It also reads the new files.
systemctl --quiet add-wants multi-user.target munge.service slurmctld.service slurmd.service
systemctl restart munge
# The daemons of all nodes find one another when they run; nothing has to wait for that here.
systemctl restart --no-block slurmctld slurmd
