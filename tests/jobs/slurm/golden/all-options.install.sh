#!/bin/bash
# Makes venv/ with stack upstream. Run it once, where the internet can be reached; it needs no root.
wanted='3.10 or newer'
condition='sys.version_info[:2] >= (3, 10)'
example=3.12
pip=''
options=''
check='import torch, transformers; assert torch.version.cuda is None, torch.__version__'
model='a'"'"'b'
dataset=me/qa
skip=''
