"""The places of a job other than a cluster of this tool: a Slurm script, and YAML for Kubernetes."""
