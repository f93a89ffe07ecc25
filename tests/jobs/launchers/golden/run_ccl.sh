#!/bin/bash
#SBATCH --job-name=squad-20260731-142501
#SBATCH --nodes=3
#SBATCH --output=/dev/null
#SBATCH --no-requeue
mkdir -p /home/ubuntu/spr-jobs/squad-20260731-142501 && cd /home/ubuntu/spr-jobs/squad-20260731-142501 || exit 1
exec >> log 2>&1
for node in node0 $(cat ~/hosts); do
  [ ! -d code/worker ] || break
  ssh $node 'cd /home/ubuntu/spr-jobs/squad-20260731-142501 && tar -cPf - $(ls -d code data model work site packages environment.json job.json run.sh 2>/dev/null) $(find . -maxdepth 8 -type l -lname "/home/*/spr-[dp]*" ! -lname "*/spr-data/s3/*" -printf "%l\n" 2>/dev/null | sort -u)' | tar -xPf -
done 2>/dev/null
export PYTHONPATH=/home/ubuntu/spr-jobs/squad-20260731-142501/code SPR_MARK=7794faae SPR_JOB_FOLDER=/home/ubuntu/spr-jobs/squad-20260731-142501
batch() {
exec /opt/spr-cluster/venv/bin/python -m worker.supervisor "$@" <<'_END_OF_THE_LAUNCH_'
{
 "spec": {
  "work": {
   "task": "",
   "options": {},
   "program": []
  },
  "resources": {
   "nodes": null,
   "placement": {
    "mode": "auto",
    "nproc_per_node": null,
    "ccl_workers": null
   }
  },
  "storage": {
   "stage": [],
   "bucket": ""
  },
  "recovery": {
   "retries": 0,
   "least_nodes": 0,
   "resumed_job": ""
  },
  "ending": {
   "until_done": false,
   "down_when_done": false,
   "max_time_s": 0.0,
   "on_finish": ""
  }
 },
 "folder": "/home/ubuntu/spr-jobs/squad-20260731-142501",
 "head": "node0",
 "mpirun": "/opt/spr-cluster/venv/bin/mpirun",
 "program": [
  "/opt/spr-cluster/venv/bin/python",
  "-m",
  "worker.tasks",
  "squad",
  "--model=distilbert-base-uncased",
  "--output=/home/ubuntu/spr-jobs/it's here"
 ],
 "nproc_per_node": 2,
 "env": {
  "FI_PROVIDER": "tcp",
  "FI_TCP_IFACE": "ens5",
  "GLOO_SOCKET_IFNAME": "ens5",
  "PYTHONPATH": "/home/ubuntu/spr-jobs/squad-20260731-142501/code",
  "PYTHONUNBUFFERED": "1",
  "LD_PRELOAD": "/usr/lib/x86_64-linux-gnu/libtcmalloc.so.4",
  "OMP_NUM_THREADS": "15",
  "OMP_PROC_BIND": "false",
  "CCL_WORKER_COUNT": "1",
  "CCL_YIELD": "sched_yield",
  "CCL_ATL_TRANSPORT": "ofi",
  "CCL_LOG_LEVEL": "error",
  "CCL_KVS_IFACE": "ens5",
  "CCL_ALLREDUCE": "recursive_doubling:0-8192;ring:8193-max",
  "SPR_MARK": "7794faae"
 },
 "pinning": {
  "node0": [
   {
    "cpus": [
     1,
     2,
     3,
     4,
     5,
     6,
     7,
     8,
     9,
     10,
     11,
     12,
     13,
     14,
     15
    ],
    "workers": [
     0
    ],
    "numa": 0
   },
   {
    "cpus": [
     17,
     18,
     19,
     20,
     21,
     22,
     23,
     24,
     25,
     26,
     27,
     28,
     29,
     30,
     31
    ],
    "workers": [
     16
    ],
    "numa": 0
   }
  ],
  "node1": [
   {
    "cpus": [
     1,
     2,
     3,
     4,
     5,
     6,
     7,
     8,
     9,
     10,
     11,
     12,
     13,
     14,
     15
    ],
    "workers": [
     0
    ],
    "numa": 0
   },
   {
    "cpus": [
     17,
     18,
     19,
     20,
     21,
     22,
     23,
     24,
     25,
     26,
     27,
     28,
     29,
     30,
     31
    ],
    "workers": [
     16
    ],
    "numa": 0
   }
  ],
  "node2": [
   {
    "cpus": [
     1,
     2,
     3,
     4,
     5,
     6,
     7,
     8,
     9,
     10,
     11,
     12,
     13,
     14,
     15
    ],
    "workers": [
     0
    ],
    "numa": 0
   },
   {
    "cpus": [
     17,
     18,
     19,
     20,
     21,
     22,
     23,
     24,
     25,
     26,
     27,
     28,
     29,
     30,
     31
    ],
    "workers": [
     16
    ],
    "numa": 0
   }
  ]
 },
 "omp_threads": 15,
 "ccl": true,
 "exports": {
  "PATH": "/opt/spr-cluster/venv/bin:/usr/local/bin:/usr/bin:/bin",
  "I_MPI_ROOT": "/opt/spr-cluster/venv",
  "LD_LIBRARY_PATH": "/opt/spr-cluster/venv/lib",
  "FI_PROVIDER_PATH": "/opt/spr-cluster/venv/lib",
  "I_MPI_JOB_RESPECT_PROCESS_PLACEMENT": "off"
 },
 "setup": [
  "ccl=$(/opt/spr-cluster/venv/bin/python -c 'import oneccl_bindings_for_pytorch as ccl; print(ccl.cwd)') || exit 1",
  ". \"$ccl/env/setvars.sh\" || exit 1"
 ],
 "again": [],
 "planned_nodes": 3
}
_END_OF_THE_LAUNCH_
}
# This shell outlives it if it is killed; only a requeue ends it by TERM. Every TERM interrupts `wait`.
# If this shell is killed as well, the keeper runs it again, with the exit code.
code=$1 asked=
if [ -z "$code" ]; then
  batch &
  trap 'asked=1; kill -TERM $! 2>/dev/null' TERM
  asked=1
fi
while [ "$asked" ]; do asked=; wait $!; code=$?; done
[ $code -le 128 ] || [ $code = 143 ] || batch $code
exit $code
