# Installs a stack, as the login user with sudo; $1 is the stack's digest. provision/install.py sets
# the variables before these lines, and puts everything into one group, which bash reads to its end
# before it starts: root, venv, python, pip, examples, system_packages, python_packages, indexes,
# find_links, lock, versions.
set -euo pipefail
# The login path begins with the environment, which this replaces.
PATH=${PATH//"$venv/bin:"/}
export DEBIAN_FRONTEND=noninteractive
# Python imports what a user has in the current folder, such as ~/queue.py.
cd /

sudo install -d -o "$(id -un)" "$root"
# An earlier run whose connection broke may still be running.
exec 9<"$root"
if ! flock -n 9; then
    echo "@step waiting for an earlier installation"
    flock -w 2400 9 || { echo 'an earlier installation does not finish'; exit 1; }
fi

check() {
    compgen -G '/usr/lib/*/libtcmalloc*.so.*' >/dev/null || {
        echo 'tcmalloc is missing after its installation'
        return 1
    }
    # A real import also writes the compiled files, which the image carries to every node.
    "$venv/bin/python" - "${versions[@]}" <<'CHECK'
import importlib
import sys

def numbers(version):
    """A version without its local part and trailing zeros: 1.13 is 1.13.0."""
    parts = version.split("+")[0].split(".")
    while len(parts) > 1 and parts[-1] == "0":
        parts.pop()
    return parts


wrong = []
for module, wanted in (pair.split("=") for pair in sys.argv[1:]):
    found = importlib.import_module(module).__version__
    if numbers(found) != numbers(wanted):
        wrong.append(f"{module}: expected {wanted}, found {found}")
sys.exit("; ".join(wrong) or 0)
CHECK
}

if [ "$(cat "$root/stack" 2>/dev/null)" = "$1" ] && check; then
    echo "@step already installed"
    exit 0
fi
rm -f "$root/stack"

# After an interruption, dpkg refuses all further work until it is configured. Take the locks of apt
# and dpkg first, in case another process is doing that.
if [ -n "$(sudo dpkg --audit)" ] || sudo bash -c 'compgen -G "/var/lib/dpkg/updates/*"' >/dev/null; then
    echo "@step finishing an interrupted installation of system packages"
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
    apt() { sudo -E apt-get -q -o DPkg::Lock::Timeout=300 -o Acquire::Retries=5 "$@"; }
    # `apt update` succeeds even if a mirror does not answer; its packages are then missing.
    for attempt in {1..3}; do
        echo "@step package lists"
        # They have another lock, for which apt has no timeout.
        for update in {1..30}; do
            apt update && break
            [ "$update" = 30 ] && exit 1
            sleep 10
        done
        echo "@step system packages: ${missing[*]}"
        apt install -y --no-install-recommends "${missing[@]}" && break
        [ "$attempt" = 3 ] && exit 1
        sleep 10
    done
fi

# Slurm's daemons start once the node is connected, with a key that no other cluster has.
if [ ! -e /etc/slurm/slurm.conf ]; then
    sudo systemctl stop munge slurmctld slurmd
    # Not by `disable`, which takes seconds for the packages' init scripts.
    sudo rm -f /etc/munge/munge.key \
        /etc/systemd/system/multi-user.target.wants/{munge,slurmctld,slurmd}.service
fi

echo "@step Python environment"
# The mark stays after an interruption: the environment's content is then unknown.
[ ! -e "$venv.unfinished" ] || rm -rf "$venv"
touch "$venv.unfinished"
[ -x "$venv/bin/pip" ] || python3 -m venv "$venv"
pip_install() {
    "$venv/bin/pip" install --disable-pip-version-check --no-input --no-cache-dir --retries 5 "$@"
}

# A lock's wheels are for one Python version.
if ((${#lock[@]})) && here=$(python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])') \
    && [ "$here" != "$python" ]; then
    echo "@step the lock is for Python $python, this is $here: resolving without it"
    lock=()
fi
# The lock is complete, and pip's own check would fail on extras that packages require of others:
# https://github.com/pypa/pip/issues/9644
locked=(--require-hashes --no-deps -r)

if [ -n "$pip" ]; then
    echo "@step pip $pip"
    if ((${#lock[@]})); then
        pip_install "${locked[@]}" <(printf '%s\n' "${lock[@]}" | grep '^pip==')
    else
        pip_install "pip==$pip"
    fi
fi

# Skip an unreachable source only if the machine's pip configuration names sources: otherwise pip
# would silently take another build, such as PyPI's torch for CUDA. It is reached as pip reaches it.
pip_settings=$("$venv/bin/pip" config list 2>/dev/null || true)
own_sources=$(grep -E '(index-url|find-links)=' <<<"$pip_settings" || true)
probe() {
    python3 - "$1" "$pip_settings" 2>&1 <<'PROBE'
import re, ssl, sys, urllib.error, urllib.request
own = {}
for section in ("global", "install", ":env:"):
    own.update(re.findall(r"^%s\.([a-z-]+)='(.+)'$" % section, sys.argv[2], re.M))
ways = []
if "proxy" in own:
    ways.append(urllib.request.ProxyHandler(dict.fromkeys(("http", "https"), own["proxy"])))
try:
    context = ssl.create_default_context(cafile=own.get("cert"))
    if "trusted-host" in own:
        context = ssl._create_unverified_context()
    ways.append(urllib.request.HTTPSHandler(context=context))
    # urllib takes a user name for a part of the host's.
    url = re.sub("//[^/?#]*@", "//", sys.argv[1])
    urllib.request.build_opener(*ways).open(url, timeout=10).close()
except urllib.error.HTTPError:
    pass  # it answers; pip requests other pages
except OSError as error:
    sys.exit(str(error))
PROBE
}
# Succeeds for a source that answers; fails for one to skip.
reach() {
    local reason pause
    for pause in 5 20 0; do
        reason=$(probe "$1") && return
        if [ -n "$own_sources" ]; then
            echo "@step $1 can't be reached ($reason); continuing with this machine's pip configuration"
            return 1
        fi
        sleep "$pause"
    done
    echo "$1 can't be reached: $reason"
    exit 1
}
extra=()
for index in "${indexes[@]}"; do ! reach "$index" || extra+=(--extra-index-url "$index"); done
for page in "${find_links[@]}"; do ! reach "$page" || extra+=(--find-links "$page"); done

echo "@step Python packages"
if ((${#lock[@]})); then
    pip_install --no-compile "${extra[@]}" "${locked[@]}" <(printf '%s\n' "${lock[@]}")
else
    pip_install --no-compile "${extra[@]}" "${python_packages[@]}"
fi

# Only the published recipe needs them: a network without GitHub must not end the installation.
if [ -n "$examples" ] && (reach "$examples"); then
    echo "@step examples of transformers"
    rm -rf "$root/examples" "$root/examples.new"
    mkdir "$root/examples.new"
    python3 - "$examples" "$root/examples.new" <<'EXAMPLES'
import pathlib, sys, tarfile, urllib.request
source, target = sys.argv[1:]
folder = "/examples/pytorch/question-answering/"
found = []
try:
    answer = urllib.request.urlopen(source, timeout=60)
except OSError as error:
    if getattr(error, "code", 0) == 429 or getattr(error, "code", 0) >= 500:
        raise  # it may pass
    print("@step %s can't be read (%s); continuing without it" % (source, error))
    sys.exit()
with answer:
    archive = tarfile.open(fileobj=answer, mode="r|gz")
    for member in archive:
        name = member.name.rpartition("/")[2]
        if member.isfile() and member.name.partition("/")[2] == folder[1:] + name:
            pathlib.Path(target, name).write_bytes(archive.extractfile(member).read())
            found.append(name)
if "run_qa.py" not in found:
    sys.exit(source + " has no " + folder[1:] + "run_qa.py")
EXAMPLES
    sync "$root/examples.new"
    rmdir "$root/examples.new" 2>/dev/null || mv "$root/examples.new" "$root/examples"
fi

# For commands such as `ssh node0 python`. Because of SHLVL, bash does not read ~/.bashrc for them: what that
# prints would be taken for their output. Login shells set PATH themselves.
sudo mkdir -p /etc/ssh/sshd_config.d /etc/profile.d
# By default, sshd drops logins at random from the tenth pending one on: fewer than a node has ranks.
printf '%s\n' "SetEnv SHLVL=1 PATH=$venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin" \
    'MaxStartups 512:30:1024' |
    sudo tee /etc/ssh/sshd_config.d/00-spr-cluster.conf >/dev/null
echo "PATH=$venv/bin:\$PATH" | sudo tee /etc/profile.d/spr-cluster.sh >/dev/null
# Not a reload: where a socket of systemd starts sshd, that could not listen again.
sudo systemctl try-restart ssh

echo "@step checking versions"
check
# The rest of what training imports: otherwise each node's first job compiles it, for 7 s of CPU time. Not at
# every check, which would take seconds more.
"$venv/bin/python" -c 'import transformers.modeling_utils, torch._inductor.compile_fx' 2>/dev/null || true
rm -f "$venv.unfinished"
echo "$1" >"$root/stack.new"
sync "$root/stack.new"
mv -f "$root/stack.new" "$root/stack"
