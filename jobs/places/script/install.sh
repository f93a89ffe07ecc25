# The rest is the same for every job. `train --to slurm-script` writes the lines above it, and it doesn't run without them.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
# pip would take what a module has there for installed, and the job does not use that.
unset PYTHONPATH PYTHONHOME
python=${PYTHON:-python3}
if ! "$python" -c "import sys; sys.exit(not ($condition))"; then
    echo "$python is $("$python" --version 2>&1); required: Python $wanted" >&2
    echo "load a module that has it, or name it: PYTHON=/path/to/python$example bash install.sh" >&2
    exit 1
fi
# The job starts only if this file, written at the end, fits its folder.
rm -f installed
"$python" -m venv venv
pip_install() { venv/bin/python -m pip install --disable-pip-version-check --no-input "$@"; }
[ -z "$pip" ] || pip_install "pip==$pip"
pip_install $options --requirement requirements.txt
[ ${#packages[@]} -eq 0 ] || pip_install "${packages[@]}"
# Without its index, pip takes another build of torch: that for CUDA.
venv/bin/python -c "$check"
# Compute nodes often have no internet access, so the hub's model and data are downloaded now. HF_HOME stays:
# the token of a login is there.
export HF_HUB_CACHE=$PWD/huggingface/hub HF_DATASETS_CACHE=$PWD/huggingface/datasets
PYTHONPATH=code venv/bin/python - "${train[@]}" <<'DOWNLOAD'
import sys
from worker.runtime.errors import WorkerError
from worker.tasks import TASKS

task = TASKS[sys.argv[1]]
try:
    task(task.Options.from_json(sys.argv[2])).download()
except WorkerError as error:
    sys.exit(f"{error.message}\n{error.hint}")
DOWNLOAD
cat install.sh requirements.txt > installed
echo "ready: sbatch job.sbatch"
