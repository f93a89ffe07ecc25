#!/bin/bash
cd /home/ubuntu/spr-jobs/squad-20260731-142501 || exit 1
trap 'echo $? > /home/ubuntu/spr-jobs/squad-20260731-142501/exit' EXIT
trap 'exit 143' TERM
echo $$ > /home/ubuntu/spr-jobs/squad-20260731-142501/pid
exec < /dev/null > /home/ubuntu/spr-jobs/squad-20260731-142501/log 2>&1
export PATH=/opt/spr-cluster/venv/bin:/usr/local/bin:/usr/bin:/bin
export I_MPI_ROOT=/opt/spr-cluster/venv
export LD_LIBRARY_PATH=/opt/spr-cluster/venv/lib
export FI_PROVIDER_PATH=/opt/spr-cluster/venv/lib
/opt/spr-cluster/venv/bin/mpirun -f /home/ubuntu/hosts -n 4 -ppn 1 -bootstrap ssh -wdir /home/ubuntu/spr-jobs/squad-20260731-142501 -genv MASTER_ADDR 172.31.0.10 -genv MASTER_PORT 29500 -genv FI_PROVIDER tcp -genv FI_TCP_IFACE ens5 -genv GLOO_SOCKET_IFNAME ens5 -genv PYTHONPATH /home/ubuntu/spr-jobs/squad-20260731-142501/code -genv PYTHONUNBUFFERED 1 -genv LD_PRELOAD /usr/lib/x86_64-linux-gnu/libtcmalloc.so.4 -genv OMP_NUM_THREADS 32 -genv OMP_PROC_BIND false -genv I_MPI_PIN_DOMAIN '[0xffffffff]' -genv SPR_PLACEMENT '[{"cpus":"0-31","threads":32,"memory":"prefer:0","workers":""}]' /opt/spr-cluster/venv/bin/python -m worker.squad --model=distilbert-base-uncased '--output=/home/ubuntu/spr-jobs/it'"'"'s here'
