# The rest is the same for every job. `train --to slurm-script` writes the lines above it.

# sbatch runs a copy of this script.
cd "$SLURM_SUBMIT_DIR" || exit 1
if ! [ -x venv/bin/python ] || ! [ -d code/worker ]; then
    echo "$PWD: submit the job in its folder, after 'bash install.sh' there" >&2
    exit 1
fi
if [ "$(cat install.sh requirements.txt)" != "$(cat installed 2>/dev/null)" ]; then
    echo "$PWD: what this job needs is not installed: run 'bash install.sh' there, to its end" >&2
    exit 1
fi
if [ -e output/results.json ]; then
    echo "$PWD: this job is finished; to train again, move output/ and output.state/ away"
    exit 0
fi
unset PYTHONHOME
export PYTHONPATH=$PWD/code HF_HUB_CACHE=$PWD/huggingface/hub HF_DATASETS_CACHE=$PWD/huggingface/datasets
# Where the ranks meet. Ports below 32768 are not taken for outgoing connections.
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 10000))
# The nodes may differ: of 64(x3),32 it is 32.
cpus=$(tr , '\n' <<< "$SLURM_JOB_CPUS_PER_NODE" | cut -d '(' -f 1 | sort -n | head -n 1)

# Not step-N.partial, which a rank was writing when it was killed.
saved() { ls -d output.state/checkpoints/step-*[0-9] 2>/dev/null; }
before=$(saved)
too_short() {
    echo "the time limit came before a checkpoint was saved: submit the job with a longer --time, or write it again" \
        "with --checkpoint-every STEPS" >&2
}
if [ "$again" ]; then
    too_short
    exit 1
fi

# SLURM_NODEID, and whether there is a tcmalloc, are known only on each node.
start='
found=
for library in /usr/lib64/libtcmalloc.so.? /usr/lib/*/libtcmalloc.so.?; do
    [ ! -e "$library" ] || found=$library
done
[ -z "$found" ] || export LD_PRELOAD=$found${LD_PRELOAD:+:$LD_PRELOAD}
exec venv/bin/python -m torch.distributed.run --node-rank="$SLURM_NODEID" "$@"'
# --cpus-per-task, --cpu-bind: the task gets all CPUs of its node, and the ranks divide them themselves.
# --export: the variables above arrive even where sbatch was called with --export=NONE.
# --mpi: another default would set variables of an MPI, and the ranks would take its ranks for theirs.
# --kill-on-bad-exit: one node that can't start ends the job at once; the others would wait for it.
srun --ntasks-per-node=1 --cpus-per-task="$cpus" --cpu-bind=none --export=ALL --mpi=none \
    --kill-on-bad-exit=1 bash -c "$start" start --nnodes="$SLURM_NNODES" \
    --nproc-per-node="$nproc_per_node" --master-addr="$first" --master-port="$port" -m "${program[@]}" &
step=$!
# A signal interrupts `wait`. If it comes as the step ends, bash 5.2 loses the step's exit code.
wait "$step"; code=$?
while kill -0 "$step" 2>/dev/null; do wait "$step"; code=$?; done

if [ -e output/results.json ]; then
    exit 0
fi
if [ "$again" ]; then
    if [ "$(saved)" = "$before" ]; then
        # The next attempt would not get further either.
        too_short
    elif scontrol requeue "$SLURM_JOB_ID"; then
        exit 0
    else
        echo "a checkpoint is saved: 'sbatch job.sbatch' resumes the training" >&2
    fi
fi
exit "$code"
