# The rest is the same for every job.

# sbatch runs a copy of this script.
cd "$SLURM_SUBMIT_DIR" || exit 1
if ! [ -x venv/bin/python ] || ! [ -d code/worker ]; then
    echo "$PWD: submit the job in its folder, after 'bash install.sh' there" >&2
    exit 1
fi
if [ -e output/results.json ]; then
    echo "$PWD: this job is finished; to train again, move output/ away"
    exit 0
fi
export PYTHONPATH=$PWD/code HF_HOME=$PWD/huggingface
# Where the ranks meet. Ports below 32768 are not taken for outgoing connections.
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 10000))

saved() { ls output/checkpoints 2>/dev/null; }
before=$(saved)
again=
# Without --batch, scancel signals only the steps: torchrun, which passes the signal on to its ranks.
trap 'again=1; scancel --signal=TERM "$SLURM_JOB_ID"' USR1
# Slurm sends this to the ranks, too, after `scancel` and before it preempts the job. Wait for them.
trap : TERM

# SLURM_NODEID, and whether there is a tcmalloc, are known only on each node.
start='
for library in /usr/lib64/libtcmalloc.so.? /usr/lib/*/libtcmalloc.so.?; do
    [ ! -e "$library" ] || export LD_PRELOAD=$library
done
exec venv/bin/python -m torch.distributed.run --node-rank="$SLURM_NODEID" "$@"'
# --cpus-per-task, --cpu-bind: the task gets all CPUs of its node, and the ranks divide them themselves.
# --export: the variables above arrive even where sbatch was called with --export=NONE.
# --mpi: another default would set variables of an MPI, and the ranks would take its ranks for theirs.
# --kill-on-bad-exit: one node that can't start ends the job at once; the others would wait for it.
srun --ntasks-per-node=1 --cpus-per-task="$SLURM_CPUS_ON_NODE" --cpu-bind=none --export=ALL --mpi=none \
    --kill-on-bad-exit=1 bash -c "$start" start --nnodes="$SLURM_NNODES" \
    --nproc-per-node="$nproc_per_node" --master-addr="$first" --master-port="$port" -m "${program[@]}" &
step=$!
# A signal interrupts `wait`.
wait "$step"; code=$?
while kill -0 "$step" 2>/dev/null; do wait "$step"; code=$?; done

if [ "$again" ] && ! [ -e output/results.json ]; then
    if [ "$(saved)" != "$before" ]; then
        scontrol requeue "$SLURM_JOB_ID" && exit 0
    else
        # The next attempt would not get further either.
        echo "the time limit came before a checkpoint was saved: submit the job with a longer --time" >&2
    fi
fi
exit "$code"
