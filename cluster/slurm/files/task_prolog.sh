#!/bin/sh
# Slurm runs it as the job's user before each task. The supervisor of an spr-cluster job is not limited.
{
    case "$SLURM_STEP_ID" in
    '' | 4294967291) [ ! -e "$HOME/spr-jobs/$SLURM_JOB_NAME/run.sh" ] || exit 0 ;;
    esac
    # If the node runs out of memory, the kernel ends a rank and no daemon.
    echo 500 >/proc/"$SLURM_TASK_PID"/oom_score_adj
    # It is empty in jobs that have whole nodes.
    [ -n "${SPR_CORES-unknown}" ] || exit 0
    python3 -I -S /etc/slurm/spr-cluster-limits hold "$SLURM_JOB_ID" "$SLURM_TASK_PID" >&3
} 3>&1 >/dev/null 2>&1
exit 0
