# The image of stack intel: docker build --tag me/spr:1 .
ARG BASE=ubuntu:22.04
FROM ${BASE}
RUN apt-get update \
 && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends ca-certificates python3-venv google-perftools numactl tzdata \
 && rm -rf /var/lib/apt/lists/*
# The library's file name changes with the release, so jobs preload it under this one.
RUN mkdir /opt/spr-cluster \
 && ln -s "$(ls /usr/lib/*/libtcmalloc.so.* | head -n 1)" /opt/spr-cluster/libtcmalloc.so \
 && test -e /opt/spr-cluster/libtcmalloc.so
RUN python3 -m venv /opt/spr-cluster/venv
COPY requirements.txt /opt/spr-cluster/
RUN /opt/spr-cluster/venv/bin/pip install --no-cache-dir --disable-pip-version-check --requirement /opt/spr-cluster/requirements.txt
# Without its index, pip takes another build of torch: that for CUDA.
RUN /opt/spr-cluster/venv/bin/python -c 'import torch, intel_extension_for_pytorch, oneccl_bindings_for_pytorch, transformers; assert torch.version.cuda is None, torch.__version__'
ADD https://github.com/huggingface/transformers/archive/refs/tags/v4.56.2.tar.gz /tmp/examples.tar.gz
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
--extra-index-url https://pytorch-extension.intel.com/release-whl/stable/cpu/us/
torch==2.7.0
intel-extension-for-pytorch==2.7.0
oneccl-bind-pt==2.7.0
transformers==4.56.2
accelerate==1.10.1
datasets==4.0.0
scikit-learn==1.7.2
peft==0.17.1
evaluate==0.4.6
numpy<2.4
boto3>=1.41,<2
impi-rt==2021.18.1
