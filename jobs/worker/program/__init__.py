"""Any program as a rank of a job: what ``spr-cluster run`` starts on the nodes, once per rank.

Started by mpirun as ``python -m jobs.worker.program``. It is copied to the nodes beside :mod:`jobs.worker.squad`, whose
check of the placement it uses, and imports nothing else of the project. It has to run on every stack's
Python, of which the oldest is 3.8.
"""
