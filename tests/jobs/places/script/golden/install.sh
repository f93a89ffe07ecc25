#!/bin/bash
# Makes venv/ with stack upstream. Run it once, where the internet can be reached; it needs no root.
wanted='3.10 or newer'
condition='sys.version_info[:2] >= (3, 10)'
example=3.12
pip=''
options=''
check='import torch, transformers; assert torch.version.cuda is None, torch.__version__'
packages=()
train=(squad '{"output": "output", "epochs": 2, "batch_size": 16, "learning_rate": null, "warmup_ratio": 0.1, "lr_schedule": "linear", "weight_decay": 0.0, "max_grad_norm": 1.0, "seed": 42, "dtype": "auto", "backend": "gloo", "accumulate": 1, "compile": "auto", "wire": "bf16", "ipex": false, "max_steps": null, "eval_every": "auto", "metric": null, "keep": "best", "patience": null, "checkpoint_every": null, "keep_checkpoints": 2, "report_to": "auto", "push_to": null, "resume": false, "trial_seconds": null, "model": "distilbert-base-uncased", "data": null, "eval": null, "max_length": 384, "attention_dropout": "off", "freeze_layers": null, "layer_decay": 1.0, "skip_bad_records": false, "token_cache": "cache/tokens", "export": null, "max_loss": 0.5, "dataset": "squad", "stride": 128, "max_answer_length": 30}')
