"""One machine: reached over SSH, known by its facts, given its software, made into an image."""
