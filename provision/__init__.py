"""One machine: SSH, facts and health, installation of its software, and images."""
