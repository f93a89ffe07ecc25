#!/bin/sh
# Ends what a job left on this node; slurmd runs it as root after each job. Only processes that have
# the job's variable or are in slurmd's control group count: the user's SSH sessions do not.
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
# Jobs get whole nodes, so what is left of the user in slurmd's control group was this job's, without its
# variables (`env -i`) and in a separate session (`setsid`).
find /proc -maxdepth 1 -name '[1-9]*' -uid "$SLURM_JOB_UID" -printf '%p/cgroup\n' 2>/dev/null |
    xargs -r grep -ls '[/_]slurm' 2>/dev/null | cut -d/ -f3 | xargs -r kill -KILL 2>/dev/null
exit 0
