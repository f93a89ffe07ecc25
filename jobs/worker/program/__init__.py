"""Any program as the ranks of a job: what ``spr-cluster run`` starts on the nodes, once per rank.

mpirun starts it as ``python -m worker.program``. It has to run on every stack's Python, the oldest of
which is 3.8.
"""
