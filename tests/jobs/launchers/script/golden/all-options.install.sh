#!/bin/bash
# Makes venv/ with stack upstream. Run it once, where the internet can be reached; it needs no root.
wanted='3.10 or newer'
condition='sys.version_info[:2] >= (3, 10)'
example=3.12
pip=''
options=''
check='import torch, transformers; assert torch.version.cuda is None, torch.__version__'
train=(squad '--model=a'"'"'b' --max-length=384 --attention-dropout=auto --token-cache=cache/tokens --dataset=me/qa --stride=128 --max-answer-length=30 --output=output --epochs=2 --batch-size=16 --warmup-ratio=0.1 --seed=7 --dtype=auto --backend=gloo --accumulate=1 --compile=auto --wire=bf16 --keep-checkpoints=2 --report-to=auto)
