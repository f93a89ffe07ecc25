#!/bin/bash
#SBATCH --job-name=squad-20260731-142501
#SBATCH --nodes=2
#SBATCH --output=/dev/null
#SBATCH --no-requeue
#SBATCH --exclusive
#SBATCH --mem=0
mkdir -p /home/ubuntu/spr-jobs/squad-20260731-142501 && cd /home/ubuntu/spr-jobs/squad-20260731-142501 || exit 1
exec >> log 2>&1
for node in node0 $(cat ~/hosts); do
  [ -d code/worker ] && sha256sum --check --status <<< "a87297cafbfce8a3b6354f65a5f38f59e7c994891f56d7c63c94effda926f064  launch.json" && break
  ssh $node 'cd /home/ubuntu/spr-jobs/squad-20260731-142501 && tar -cPf - $(ls -d code data model work site packages environment.json job.json launch.json run.sh 2>/dev/null) $(find . -maxdepth 8 -type l -lname "/home/*/spr-[dp]*" ! -lname "*/spr-data/s3/*" -printf "%l\n" 2>/dev/null | sort -u)' | tar -xPf -
done 2>/dev/null
export PYTHONPATH=/home/ubuntu/spr-jobs/squad-20260731-142501/code SPR_MARK=7794faae SPR_JOB_FOLDER=/home/ubuntu/spr-jobs/squad-20260731-142501 SPR_CORES=
supervise="/opt/spr-cluster/venv/bin/python -m worker.supervisor"
# This shell outlives it if it is killed; only a requeue ends it by TERM. Every TERM interrupts `wait`.
# If this shell is killed as well, the keeper runs it again, with the exit code.
code=$1 asked=
if [ -z "$code" ]; then
  $supervise &
  trap 'asked=1; kill -TERM $! 2>/dev/null' TERM
  asked=1
fi
while [ "$asked" ]; do asked=; wait $!; code=$?; done
[ $code -le 128 ] || [ $code = 143 ] || exec $supervise $code
exit $code
