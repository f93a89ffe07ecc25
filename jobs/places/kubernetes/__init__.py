"""The same training job on Kubernetes: its image, its claim, and a TrainJob or PyTorchJob."""
