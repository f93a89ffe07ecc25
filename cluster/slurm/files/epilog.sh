#!/bin/sh
# Ends what a job left on this node; slurmd runs it as root after each job. Only processes that have
# the job's variable or are in its slice or in slurmd's control group count: the user's SSH sessions do not.
[ "${SLURM_JOB_UID:-0}" != 0 ] || exit 0
# As the job's user: it can end only its own processes, and in a container even root can't read
# another user's environment.
group=$(id -g "$SLURM_JOB_UID")
env -u SLURM_JOB_ID setpriv --reuid="$SLURM_JOB_UID" --regid="$group" --clear-groups sh -c '
for round in 1 2 3 4 5; do
    left=$(grep -lzx "SLURM_JOB_ID=$0" /proc/[0-9]*/environ 2>/dev/null | cut -d/ -f3)
    [ -n "$left" ] || break
    kill -KILL $left
    sleep 0.2
done 2>/dev/null
exit 0' "$SLURM_JOB_ID"
# The slice of a job that shares its nodes.
limits=/run/systemd/system.control/spr-$SLURM_JOB_ID.slice.d
if [ -e "$limits" ]; then
    systemctl kill --signal=KILL "spr-$SLURM_JOB_ID.slice"
    systemctl stop "spr-guard-$SLURM_JOB_ID.service" "spr-$SLURM_JOB_ID.slice"
    rm -rf "$limits"
fi 2>/dev/null
# Without another job here, what is left of the user in slurmd's control group was this job's, without its
# variables (`env -i`) and in a separate session (`setsid`).
left=$(find /proc -maxdepth 1 -name '[1-9]*' -uid "$SLURM_JOB_UID" -printf '%p/cgroup\n' 2>/dev/null |
    xargs -r grep -ls '[/_]slurm' 2>/dev/null | cut -d/ -f3)
# Looked for last: a job that has just begun has its daemon before its processes.
! pgrep -af '^slurmstepd: \[' | grep -qv "\[$SLURM_JOB_ID\." || exit 0
[ -z "$left" ] || kill -KILL $left 2>/dev/null
exit 0
