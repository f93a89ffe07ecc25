# Powers an idle cluster off. Runs as root on every node; each records its last use, and the head
# decides. provision/user_data.py sets the variables before these lines: idle_file (seconds, or 0 for
# never), state (a folder), homes.
jobs=$homes/ubuntu/spr-jobs

idle_timeout=0
{ read -r idle_timeout; } 2>/dev/null <"$idle_file"
case $idle_timeout in 0 | '' | *[!0-9]*)
    # A timeout that is set later begins then.
    touch "$state/last-busy"
    exit 0
    ;;
esac

# /etc/hosts names the head once the cluster is connected; until then nothing is idle.
head=$(getent -s files hosts node0 | while read -r address _; do echo "$address"; break; done)

in_session() {
    # A failing query counts as use. The head's own connections belong to a job or to the query below.
    found=$(ss -Htn state established '( sport = :22 )') || return 0
    [ -n "$(echo "$found" | awk -v head="$head" 'NF {
        peer = $4
        sub(/:[0-9]+$/, "", peer)
        if (peer != head && peer != "[::ffff:" head "]") print
    }')" ]
}

on_head() { [ -n "$(ip -o -4 address show to "$head")" ]; }

# Whether the queue on stdin has a job that runs, waits for others, or waits for `repair`. One that is
# held, or needs more nodes than there have ever been, must not keep the cluster running.
in_queue() {
    while IFS='|' read -r state reason name; do
        case "$state $reason" in
            RUNNING* | CONFIGURING* | COMPLETING*) return 0 ;;
            "PENDING None" | "PENDING Resources" | "PENDING Priority" | "PENDING BeginTime") return 0 ;;
            # A node of it is down or drained. Jobs that users submitted themselves do not count.
            "PENDING ReqNodeNotAvail"* | "PENDING Nodes required for job are DOWN"*) mark=run.sh ;;
            # There are fewer nodes than when it began.
            "PENDING PartitionNodeLimit" | "PENDING PartitionConfig") mark=begin.json ;;
            *) continue ;;
        esac
        if [ -n "$name" ] && [ -e "$jobs/$name/$mark" ]; then return 0; fi
    done
    return 1
}

# Slurm starts one process per job on each of its nodes, and slurmd a permanent one (cgroups version 2).
# Only the head knows the queue.
in_job() {
    if pgrep -ax slurmstepd | grep -qv ' infinity$'; then return 0; fi
    on_head && timeout 20 squeue -h -o '%T|%r|%j' 2>/dev/null | in_queue
}

# Whether `repair`, which makes this worker the head, would start a job again.
waits_for_head() {
    for job in "$jobs"/*; do
        if [ -e "$job/end.json" ] || [ -e "$job/cancelled" ]; then continue; fi
        if grep -qsx '#SBATCH --requeue' "$job/run.sh"; then return 0; fi
    done
    return 1
}

# Runs a command on all other nodes at the same time; skips unreachable ones.
others() {
    grep -vx node0 "$homes/ubuntu/hosts" | timeout 120 runuser -u ubuntu -- \
        xargs -r -P 64 -I@ sh -c 'timeout 30 ssh -o ConnectTimeout=10 @ "$0" || true' "$1"
}

# A worker that has become the head, by `repair`, does not know how long the lost one was idle.
becomes_head() { on_head && rm "$state/last-head" 2>/dev/null; }

if [ -z "$head" ] || in_session || in_job || becomes_head || [ ! -e "$state/last-busy" ]; then
    touch "$state/last-busy"
    exit 0
fi
idle_for() {
    now=$(date +%s) && last=$(stat -c %Y "$1") && [ $((now - last)) -ge "$idle_timeout" ]
}

if ! on_head; then
    # A worker leaves the decision to the head, and decides only if there is no head. It tests only
    # the port: a head under full load still accepts the connection.
    if [ ! -e "$state/last-head" ] || timeout 10 bash -c ": </dev/tcp/$head/22" 2>/dev/null; then
        touch "$state/last-head"
        exit 0
    fi
    if waits_for_head; then
        touch "$state/last-busy"
        exit 0
    fi
    idle_for "$state/last-head" && idle_for "$state/last-busy" || exit 0
    echo "<4>no head for $idle_timeout s: powering off"
    systemctl poweroff || systemctl poweroff --force --force
    exit 0
fi
idle_for "$state/last-busy" || exit 0
# Another node may be in use without the head.
[ -z "$(others "find $state/last-busy -newermt '-$idle_timeout seconds'")" ] || exit 0
# As at the deadline, the grace period is for what is only on the nodes: keeper.py.
held=$(SPR_KEEPER=held sh "$state/keeper")
if in_session || in_job; then exit 0; fi
if [ "$held" != nothing ]; then
    set -- $(sh "$state/expiry" show)
    idle_timeout=$((idle_timeout + ${3:-0}))
    if ! idle_for "$state/last-busy"; then
        [ "$held" != head ] || others 'sudo systemctl poweroff'
        exit 0
    fi
fi
echo "<4>idle for $idle_timeout s: powering off all nodes"
others 'sudo systemctl poweroff'
systemctl poweroff || systemctl poweroff --force --force
