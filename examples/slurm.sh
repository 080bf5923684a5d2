#!/bin/bash
# A job that Slurm may preempt or end at its time limit, and that goes on when it starts again.
#
#   sbatch examples/slurm.sh
#
# Slurm sends SIGUSR1 120 seconds before it ends the job. The ranks finish their step, write a
# checkpoint and end with status 75. The script then puts the job back into the queue.
#SBATCH --job-name=skim
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --time=04:00:00
#SBATCH --signal=USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append

run=$SLURM_SUBMIT_DIR/run-$SLURM_JOB_ID # on a disk that all nodes share; a requeued job keeps its id
resume=()
if compgen -G "$run/step-*" >/dev/null; then resume=(--resume); fi

srun --mpi=pmix skim train --model resnet20 --data cifar10 --epochs 100 --density 0.01 \
  --checkpoint "$run" --checkpoint-time 10min --grace 100s --metrics "$run.jsonl" "${resume[@]}"
status=$?

if [ "$status" -eq 75 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$status"
