"""Question answering on SQuAD. mpirun starts it on every rank as ``python -m worker.squad``.

``options`` and ``dataset`` need only the standard library: the laptop, which has no torch, uses them to
check its input and to build the command.
"""
