"""How fast the machines are: what ``spr-cluster bench`` runs on the nodes, one process per rank.

Started by mpirun as ``python -m jobs.worker.bench``, or alone on any machine with torch. It is copied to the
nodes beside :mod:`jobs.worker.squad`, whose ranks, events and checks it uses, and imports nothing else of the
project.

Each rank measures with the cores and the memory that a training job's rank would have, and all ranks
of a node measure at the same time, so that what a node can do is the sum of its ranks. Units: TFLOPS
(10^12 floating-point operations a second, a multiply-add counts two), GB/s (10^9 bytes a second).
"""
