# The image of stack upstream: docker build --tag me/spr:1 .
ARG BASE=ubuntu:24.04
FROM ${BASE}
RUN apt-get update \
 && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends ca-certificates python3-venv google-perftools numactl g++ python3-dev tzdata \
 && rm -rf /var/lib/apt/lists/*
# The library's file name changes with the release, so jobs preload it under this one.
RUN mkdir /opt/spr-cluster \
 && ln -s "$(ls /usr/lib/*/libtcmalloc.so.* | head -n 1)" /opt/spr-cluster/libtcmalloc.so \
 && test -e /opt/spr-cluster/libtcmalloc.so
RUN python3 -m venv /opt/spr-cluster/venv
COPY requirements.txt /opt/spr-cluster/
RUN /opt/spr-cluster/venv/bin/pip install --no-cache-dir --disable-pip-version-check --requirement /opt/spr-cluster/requirements.txt
# Without its index, pip takes another build of torch: that for CUDA.
RUN /opt/spr-cluster/venv/bin/python -c 'import torch, transformers; assert torch.version.cuda is None, torch.__version__'
ADD https://github.com/huggingface/transformers/archive/refs/tags/v5.23.0.tar.gz /tmp/examples.tar.gz
RUN mkdir /opt/spr-cluster/examples && tar -xzf /tmp/examples.tar.gz -C /opt/spr-cluster/examples --strip-components=4 --wildcards \
      '*/examples/pytorch/question-answering/*.py' \
 && test -e /opt/spr-cluster/examples/run_qa.py \
 && rm /tmp/examples.tar.gz
COPY code /opt/spr-cluster/code
ENV PATH=/opt/spr-cluster/venv/bin:$PATH PYTHONPATH=/opt/spr-cluster/code HOME=/tmp USER=spr LOGNAME=spr
# Not root. A number, so that Kubernetes can check it.
USER 1000
WORKDIR /tmp

# requirements.txt
--extra-index-url https://download.pytorch.org/whl/cpu
torch==2.13.0
transformers==5.23.0
datasets==5.2.0
tzdata>=2025.2
scikit-learn==1.8.0
peft==0.21.2
accelerate==1.15.0
evaluate==0.4.6
boto3>=1.41,<2
impi-rt==2021.18.1
