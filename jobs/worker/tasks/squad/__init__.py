"""Question answering on SQuAD: see :mod:`.task`."""
