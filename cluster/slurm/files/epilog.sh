#!/bin/sh
# Ends what a job left on this node; slurmd runs it as root after each job. Only processes that have
# the job's variable count: the user's SSH sessions do not.
[ "${SLURM_JOB_UID:-0}" != 0 ] || exit 0
# As the job's user: it can end only its own processes, and in a container even root can't read
# another user's environment.
group=$(id -g "$SLURM_JOB_UID")
exec env -u SLURM_JOB_ID setpriv --reuid="$SLURM_JOB_UID" --regid="$group" --clear-groups sh -c '
for round in 1 2 3 4 5; do
    left=$(grep -lzx "SLURM_JOB_ID=$0" /proc/[0-9]*/environ 2>/dev/null | cut -d/ -f3)
    [ -n "$left" ] || break
    kill -KILL $left
    sleep 0.2
done 2>/dev/null
exit 0' "$SLURM_JOB_ID"
