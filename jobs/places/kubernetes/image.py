"""The image of a job's pods: a stack, as defined for bare metal, and `jobs/worker`. Pure."""

from __future__ import annotations

import shlex
from pathlib import Path

from jobs import worker
from jobs.places.files import worker_files
from jobs.places.placement import Preload
from provision.install import EXAMPLES, VENV
from provision.stacks.stack import Stack, pip_options, render_import_check, render_requirements

_ROOT = str(Path(VENV).parent)
CODE = f"{_ROOT}/code"
"""The folder of the package ``worker`` in the image."""
TCMALLOC = f"{_ROOT}/libtcmalloc.so"
USER = 1000
_IOMP5 = "intel-openmp"
_PIP = f"{VENV}/bin/pip install --no-cache-dir --disable-pip-version-check"
_DOCKERFILE = """\
# The image of stack {stack}: docker build --tag {image} .
ARG BASE=ubuntu:{ubuntu}
FROM ${{BASE}}
RUN apt-get update \\
 && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends ca-certificates {packages} \\
 && rm -rf /var/lib/apt/lists/*
# The library's file name changes with the release, so jobs preload it under this one.
RUN mkdir {root} \\
 && ln -s "$(ls /usr/lib/*/libtcmalloc.so.* | head -n 1)" {tcmalloc} \\
 && test -e {tcmalloc}
RUN python3 -m venv {venv}
COPY requirements.txt {root}/
{install}
# Without its index, pip takes another build of torch: that for CUDA.
RUN {venv}/bin/python -c {check}
{examples}COPY code {code}
ENV PATH={venv}/bin:$PATH PYTHONPATH={code} HOME=/tmp USER=spr LOGNAME=spr
# Not root. A number, so that Kubernetes can check it.
USER {user}
WORKDIR /tmp
"""
_EXAMPLES = """\
ADD {url} /tmp/examples.tar.gz
RUN mkdir {folder} && tar -xzf /tmp/examples.tar.gz -C {folder} --strip-components=4 --wildcards \\
      '*/examples/pytorch/question-answering/*.py' \\
 && test -e {folder}/run_qa.py \\
 && rm /tmp/examples.tar.gz
"""


def find_preloads(stack: Stack) -> Preload:
    """Return the libraries that ranks preload; Intel's OpenMP only if the stack specifies it."""
    return Preload(TCMALLOC, f"{VENV}/lib/libiomp5.so" if stack.requirement(_IOMP5) else None)


def sample_in_image(path: Path) -> str:
    """Return the path of a task's sample data in the image."""
    return f"{CODE}/worker/{path.relative_to(Path(worker.__file__).parent)}"


def build_files(
    stack: Stack, image: str, packages: tuple[str, ...] = ()
) -> dict[str, Path | bytes]:
    """Return the files of an image's build folder, with a job's ``packages`` beside the stack's."""
    return {
        "Dockerfile": render_dockerfile(stack, image, packages).encode(),
        "requirements.txt": render_requirements(stack).encode(),
        **worker_files(),
    }


def render_dockerfile(stack: Stack, image: str, packages: tuple[str, ...] = ()) -> str:
    """Return the Dockerfile. It pins everything except Ubuntu's packages."""
    return _DOCKERFILE.format(
        stack=stack.name,
        image=image,
        ubuntu=stack.ubuntu,
        packages=shlex.join(stack.system_packages),
        root=_ROOT,
        venv=VENV,
        tcmalloc=TCMALLOC,
        install=_render_install(stack, packages),
        check=shlex.quote(render_import_check(stack)),
        examples=_EXAMPLES.format(url=stack.examples, folder=EXAMPLES) if stack.examples else "",
        code=CODE,
        user=USER,
    )


def _render_install(stack: Stack, packages: tuple[str, ...]) -> str:
    # A lock contains pip itself.
    own = [f"RUN {_PIP} pip=={stack.pip}"] if stack.pip else []
    words = [_PIP, pip_options(stack), "--requirement", f"{_ROOT}/requirements.txt"]
    more = [f"RUN {_PIP} {shlex.join(packages)}"] if packages else []
    return "\n".join([*own, f"RUN {' '.join(filter(None, words))}", *more])
