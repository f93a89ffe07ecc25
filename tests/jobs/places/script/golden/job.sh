#!/bin/bash
# Trains a model with spr-cluster's code. In this file's folder, run
# `bash install.sh` once, then `sbatch job.sbatch`.
#SBATCH --job-name=bert
#SBATCH --nodes=2
# One task per node: torchrun, which starts the node's ranks.
#SBATCH --ntasks-per-node=1
# Whole nodes, with all of their memory, and none with fewer CPUs than the ranks have threads.
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --mincpus=32
# One log, also of later attempts.
#SBATCH --output=log
#SBATCH --open-mode=append
# After the loss of a node, the job starts again, and resumes from its newest checkpoint.
#SBATCH --requeue
# Two jobs must not write to one folder: of a user's jobs with this name, one runs at a time.
#SBATCH --dependency=singleton
# So many seconds before the time limit, this script (B) has the ranks save a checkpoint, and puts the job
# back into the queue.
#SBATCH --signal=B:USR1@180

again=
# Without --batch, scancel signals only the steps: torchrun, which passes the signal on to its ranks.
trap 'again=1; scancel --signal=TERM "$SLURM_JOB_ID"' USR1
# After `scancel` and before a preemption, Slurm also sends this to the ranks. Wait for them.
trap : TERM

# 1 x 32 = 32 of a node's 32 cores: each rank finds the CPUs that it may use, and takes its own.
# What the shell that submits the job has set about threads would undo this.
unset "${!OMP_@}" "${!GOMP_@}" "${!KMP_@}"
# In a shell that srun has started, the variables of its MPI number the ranks: all would be rank 0.
unset "${!PMI@}" "${!MPI_LOCAL@}"
export PYTHONUNBUFFERED=1
export OMP_NUM_THREADS=32
export OMP_PROC_BIND=false
export SPR_NAMES='{}'
# Time for a checkpoint: torchrun's own limit is 30 s.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=120
# install.sh has downloaded what the job needs from the hub.
export HF_HUB_OFFLINE=1
nproc_per_node=1
program=(worker.tasks squad '{"output": "output", "epochs": 2, "batch_size": 16, "learning_rate": null, "warmup_ratio": 0.1, "lr_schedule": "linear", "weight_decay": 0.0, "max_grad_norm": 1.0, "seed": 42, "dtype": "auto", "backend": "gloo", "accumulate": 1, "compile": "auto", "wire": "bf16", "ipex": false, "max_steps": null, "eval_every": "auto", "metric": null, "keep": "best", "patience": null, "checkpoint_every": null, "keep_checkpoints": 2, "report_to": "auto", "push_to": null, "resume": false, "trial_seconds": null, "model": "distilbert-base-uncased", "data": null, "eval": null, "max_length": 384, "attention_dropout": "off", "freeze_layers": null, "layer_decay": 1.0, "skip_bad_records": false, "token_cache": "cache/tokens", "export": null, "max_loss": 0.5, "dataset": "squad", "stride": 128, "max_answer_length": 30}' --resume)
