# Installs a stack. provision/install.py puts the values before these lines, and the whole into one
# group, which bash reads to its end before it begins: root, venv, system_packages, python_packages,
# indexes, versions. Runs as the login user, with sudo; $1 is the stack's digest.
set -euo pipefail
export DEBIAN_FRONTEND=noninteractive

sudo install -d -o "$(id -un)" "$root"
# An earlier run, whose connection broke, may still be at work here.
exec 9<"$root"
if ! flock -n 9; then
    echo "@step an earlier installation still runs; waiting for it"
    flock -w 2400 9 || { echo 'an earlier installation does not end'; exit 1; }
fi

check() {
    compgen -G '/usr/lib/*/libtcmalloc*.so.*' >/dev/null || {
        echo 'tcmalloc is not there after its installation'
        return 1
    }
    # A real import also leaves the compiled files behind, which the image then carries to every node.
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
}

if [ "$(cat "$root/stack" 2>/dev/null)" = "$1" ] && check; then
    echo "@step already installed"
    exit 0
fi
rm -f "$root/stack"

# Interrupted, dpkg refuses all further work until it has ended what it began. Not while another one
# is at it, though: these are the locks that apt and dpkg take.
if [ -n "$(sudo dpkg --audit)" ] || sudo bash -c 'compgen -G "/var/lib/dpkg/updates/*"' >/dev/null; then
    echo "@step ending an interrupted installation of system packages"
    sudo timeout 900 python3 -c 'import fcntl
for name in ("lock-frontend", "lock"):
    fcntl.lockf(open(f"/var/lib/dpkg/{name}", "w"), fcntl.LOCK_EX)'
    sudo -E dpkg --force-confdef --force-confold --configure -a </dev/null
fi
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

echo "@step Python environment"
# The mark stays where this is interrupted: nobody knows then what is in it.
[ ! -e "$venv.unfinished" ] || rm -rf "$venv"
touch "$venv.unfinished"
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
"$venv/bin/pip" install --disable-pip-version-check --no-input --no-compile --no-cache-dir --retries 5 \
    "${extra[@]}" "${python_packages[@]}"

echo "@step checking versions"
check
rm -f "$venv.unfinished"
echo "$1" >"$root/stack.new"
sync "$root/stack.new"
mv -f "$root/stack.new" "$root/stack"
