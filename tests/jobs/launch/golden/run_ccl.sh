#!/bin/bash
# nodes: 4
cd /home/ubuntu/spr-jobs/squad-20260731-142501 || exit 1
trap 'echo $? > /home/ubuntu/spr-jobs/squad-20260731-142501/exit' EXIT
trap 'exit 143' TERM
echo $$ > /home/ubuntu/spr-jobs/squad-20260731-142501/pid
exec < /dev/null > /home/ubuntu/spr-jobs/squad-20260731-142501/log 2>&1
setsid -f bash -c 'grep -aqm1 '"'"'@spr {"event": "error"'"'"' < <(tail -n +1 -F -s 1 --pid=$1 /home/ubuntu/spr-jobs/squad-20260731-142501/log) || exit
timeout 15 tail -f --pid=$1 /dev/null && exit
# ending a job on all nodes
d=~/spr-jobs/squad-20260731-142501
cd "$d" || exit
find="grep -lszxF SPR_JOB_FOLDER=$d /proc/[0-9]*/environ | cut -d / -f 3"
started=$(cat pid 2>/dev/null)
leader=$started
grep -qs "$d/" "/proc/$leader/cmdline" || leader=
is_left() {
  # Another end of the job may have been faster, and the job may be running again.
  [ "$(cat pid 2>/dev/null)" = "$started" ] || exit
  [ -n "$leader" ] && kill -0 "$leader" 2>/dev/null || [ -n "$(eval "$find")" ]
}
if [ -n "$leader" ]; then
  # mpirun passes the signal on and waits for everything else. The script ends after mpirun, with 143.
  kill -TERM "$leader"
  pkill -TERM -g "$leader" -x mpiexec.hydra || kill -TERM -- "-$leader"
else
  kill -TERM $(eval "$find")
fi 2>/dev/null
for i in $(seq 0); do is_left || break; sleep 0.2; done
if is_left; then
  kill -KILL $(eval "$find") 2>/dev/null
  awk "NR > 1" ~/hosts | xargs -r -P 64 -I@ sh -c "timeout 20 ssh -n -o ConnectTimeout=10 @ \
    \"\$0\" > /dev/null 2>&1 || echo @" "kill -KILL \$($find) 2>/dev/null; true"
  for i in $(seq 25); do is_left || break; kill -KILL $(eval "$find") 2>/dev/null; sleep 0.2; done
  [ -z "$leader" ] || kill -KILL -- "-$leader" 2>/dev/null
fi
[ -s exit ] || echo 137 > exit
' watch $$ > /dev/null 2>&1
export SPR_JOB_FOLDER=/home/ubuntu/spr-jobs/squad-20260731-142501
ccl=$(/opt/spr-cluster/venv/bin/python -c 'import oneccl_bindings_for_pytorch as ccl; print(ccl.cwd)') || exit 1
. "$ccl/env/setvars.sh" || exit 1
export PATH=/opt/spr-cluster/venv/bin:/usr/local/bin:/usr/bin:/bin
export I_MPI_ROOT=/opt/spr-cluster/venv
export LD_LIBRARY_PATH=/opt/spr-cluster/venv/lib
export FI_PROVIDER_PATH=/opt/spr-cluster/venv/lib
/opt/spr-cluster/venv/bin/mpirun -f /home/ubuntu/hosts -n 8 -ppn 2 -bootstrap ssh -wdir /home/ubuntu/spr-jobs/squad-20260731-142501 -genv MASTER_ADDR 172.31.0.10 -genv MASTER_PORT 29500 -genv FI_PROVIDER tcp -genv FI_TCP_IFACE ens5 -genv GLOO_SOCKET_IFNAME ens5 -genv PYTHONPATH /home/ubuntu/spr-jobs/squad-20260731-142501/code -genv SPR_JOB_FOLDER /home/ubuntu/spr-jobs/squad-20260731-142501 -genv PYTHONUNBUFFERED 1 -genv LD_PRELOAD /usr/lib/x86_64-linux-gnu/libtcmalloc.so.4 -genv OMP_NUM_THREADS 15 -genv OMP_PROC_BIND false -genv CCL_WORKER_COUNT 1 -genv CCL_ATL_TRANSPORT ofi -genv CCL_KVS_IFACE ens5 -genv I_MPI_PIN_DOMAIN '[0xfffe,0xfffe0000]' -genv SPR_PLACEMENT '[{"cpus":"1-15","threads":15,"memory":"prefer:0","workers":"0"},{"cpus":"17-31","threads":15,"memory":"prefer:0","workers":"16"}]' -genv CCL_WORKER_AFFINITY 0,16 /opt/spr-cluster/venv/bin/python -m worker.squad --model=distilbert-base-uncased '--output=/home/ubuntu/spr-jobs/it'"'"'s here'
