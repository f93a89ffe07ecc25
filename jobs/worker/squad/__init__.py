"""Question answering on SQuAD: what runs on the nodes, started by mpirun as ``python -m squad``.

The folder is copied to every node as it is, so it imports nothing of the rest of the project.
``options``, ``dataset`` and ``events`` need the standard library only: the machine that submits
the job has no torch, and uses them to check its input, build the argv and read the output.
"""
