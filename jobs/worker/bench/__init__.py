"""Speed of the machines: what ``spr-cluster bench`` runs on the nodes, one process per rank.

mpirun starts it as ``python -m worker.bench``; it also runs alone on any machine with torch.

Each rank measures with the cores and memory of a training job's rank. All ranks of a node measure at the same
time, so that a node's speed is the sum of its ranks. Units: TFLOPS (10^12 floating-point operations per
second; a multiply-add counts as two), GB/s (10^9 bytes per second).
"""
