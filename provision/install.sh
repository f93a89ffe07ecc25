# Installs a stack. provision/install.py puts the values before these lines:
# venv, system_packages, python_packages, indexes, versions. Runs as the login user, with sudo.
set -euo pipefail
export DEBIAN_FRONTEND=noninteractive

missing=()
for package in "${system_packages[@]}"; do
    dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing+=("$package")
done
if ((${#missing[@]})); then
    echo "@step system packages: ${missing[*]}"
    apt() { sudo -E apt-get -q -o DPkg::Lock::Timeout=900 -o Acquire::Retries=5 "$@"; }
    # The lists have a lock of their own, for which apt has no timeout.
    for attempt in {1..30}; do apt update && break; [ "$attempt" = 30 ] && exit 1; sleep 10; done
    apt install -y --no-install-recommends "${missing[@]}"
fi
compgen -G '/usr/lib/*/libtcmalloc*.so.*' >/dev/null || { echo 'tcmalloc is not there after its installation'; exit 1; }

echo "@step Python environment"
sudo install -d -o "$(id -un)" "$(dirname "$venv")"
[ -x "$venv/bin/pip" ] || python3 -m venv "$venv"

# An index that can't be reached is left out: the machine's own pip configuration may have what is needed.
extra=()
for index in "${indexes[@]}"; do
    if reason=$(python3 - "$index" 2>&1 <<'PROBE'
import sys, urllib.error, urllib.request
try:
    urllib.request.urlopen(sys.argv[1], timeout=10).close()
except urllib.error.HTTPError:
    pass  # it answers; pip asks for other pages than this one
except OSError as error:
    sys.exit(str(error))
PROBE
    ); then
        extra+=(--extra-index-url "$index")
    else
        echo "@step $index can't be reached ($reason); going on without it"
    fi
done

echo "@step Python packages"
"$venv/bin/pip" install --disable-pip-version-check --no-input --no-compile --no-cache-dir --retries 5 "${extra[@]}" "${python_packages[@]}"

# A real import also leaves the compiled files behind, which the image then carries to every node.
echo "@step checking versions"
"$venv/bin/python" - "${versions[@]}" <<'CHECK'
import importlib
import sys

wrong = []
for module, wanted in (pair.split("=") for pair in sys.argv[1:]):
    found = importlib.import_module(module).__version__.split("+")[0]
    if found != wanted:
        wrong.append(f"{module}: wanted {wanted}, found {found}")
sys.exit("; ".join(wrong) or 0)
CHECK
