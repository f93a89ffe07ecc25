#!/bin/bash
cd /home/ubuntu/spr-jobs/squad-20260731-142501 || exit 1
trap 'echo $? > /home/ubuntu/spr-jobs/squad-20260731-142501/exit' EXIT
trap 'exit 143' TERM
echo $$ > /home/ubuntu/spr-jobs/squad-20260731-142501/pid
exec < /dev/null > /home/ubuntu/spr-jobs/squad-20260731-142501/log 2>&1
ccl=$(/opt/spr-cluster/venv/bin/python -c 'import oneccl_bindings_for_pytorch as ccl; print(ccl.cwd)') || exit 1
. "$ccl/env/setvars.sh" || exit 1
export PATH=/opt/spr-cluster/venv/bin:/usr/local/bin:/usr/bin:/bin
export I_MPI_ROOT=/opt/spr-cluster/venv
export LD_LIBRARY_PATH=/opt/spr-cluster/venv/lib
export FI_PROVIDER_PATH=/opt/spr-cluster/venv/lib
/opt/spr-cluster/venv/bin/mpirun -f /home/ubuntu/hosts -n 8 -ppn 2 -bootstrap ssh -wdir /home/ubuntu/spr-jobs/squad-20260731-142501 -genv MASTER_ADDR 172.31.0.10 -genv MASTER_PORT 29500 -genv FI_PROVIDER tcp -genv FI_TCP_IFACE ens5 -genv GLOO_SOCKET_IFNAME ens5 -genv PYTHONPATH /home/ubuntu/spr-jobs/squad-20260731-142501/code -genv PYTHONUNBUFFERED 1 -genv LD_PRELOAD /usr/lib/x86_64-linux-gnu/libtcmalloc.so.4 -genv OMP_NUM_THREADS 15 -genv OMP_PROC_BIND false -genv CCL_WORKER_COUNT 1 -genv CCL_ATL_TRANSPORT ofi -genv CCL_KVS_IFACE ens5 -genv I_MPI_PIN_DOMAIN '[0xfffe,0xfffe0000]' -genv SPR_PLACEMENT '[{"cpus":"1-15","threads":15,"memory":"prefer:0","workers":"0"},{"cpus":"17-31","threads":15,"memory":"prefer:0","workers":"16"}]' -genv CCL_WORKER_AFFINITY 0,16 /opt/spr-cluster/venv/bin/python -m worker.squad --model=distilbert-base-uncased '--output=/home/ubuntu/spr-jobs/it'"'"'s here'
