# Submits a job. slurm.py puts these variables before these lines:
#   job      the job's ID                      root     its folder
#   new      the uploaded files' suffix        secrets  the name of the file with secrets
#   resumed  not empty for a resumed job       active   the exit code if it is in the queue already
#   ended    the exit code if another command has canceled it
#
# The queue takes the job before anything changes, and starts it when all nodes have it: a job to resume that
# is refused stays as it ended on every node. An earlier log belongs to a resumed job, or to another run of a
# study with the same folder. The rest continues without this shell, which waits for it.
cd "$root" && chmod 700 .. || exit
if [ -n "$resumed" ]; then
    # Two commands may resume a job at the same time: the lock shows the second the first's job.
    exec 9<. && flock 9 && queue=$(squeue --noheader --name="$job" --format=%T) || exit
    case $queue in '' | COMPLETING) ;; *) rm -f ./*."$new"; exit "$active" ;; esac
fi

# Runs a command for each other node, @. It must not exit with 255, as ssh does if a node does not answer: xargs
# would stop. The exports stay in this subshell, because sbatch passes its environment on to the job.
on_others() (
    export root new secrets enter take sent
    tail -n +2 ~/hosts | xargs -r -P 32 -I@ sh -c "$1"
)
refuse() {
    if [ -e "$secrets" ]; then
        rm "$secrets"
        on_others 'ssh -n -o ConnectTimeout=10 @ "rm -f $root/$secrets" || :'
    fi
    rm -f ./*."$new"
    exit "$1"
}
release() {
    on_others 'tar -cf - --transform "s/$/.$new/" $sent | timeout 60 ssh -o ConnectTimeout=10 @ "$take" || :'
    scontrol release "$1"
    # The command that submits does not wait for the rest.
    exec >/dev/null 2>&1
    # slurmctld saves its state within 5 s. If killed sooner, it forgets that it may start the job.
    while [ -e run.sh ]; do
        sleep 8
        case "$(scontrol -o show job "$1" 2>&1)" in
        *" JobName=$job "*" Reason=JobHeldUser "*) scontrol release "$1" ;;
        JobId=* | *'Invalid job id'*) exit ;;
        esac
    done
}
enter="mkdir -p $root && cd $root"
move="{ [ ! -e job.json.$new ] || mv job.json.$new job.json; } &&
    mv launch.json.$new launch.json && mv run.sh.$new run.sh"
take="$enter && chmod 700 .. && tar -xmf - && rm -f first.json end.json cancelled && $move"

if [ -e "$secrets.$new" ]; then
    mv "$secrets.$new" "$secrets"
    on_others 'ssh -o ConnectTimeout=10 @ "$enter && umask 077 && cat >$secrets" <"$secrets" ||
        { echo "@ does not take the variables" >&2; exit 1; }' || refuse 1
fi
# With these files, the job starts again after the loss of the head.
sent=$(echo *."$new")
sent="${sent//.$new/}"
id=$(sbatch --hold --parsable "run.sh.$new") || refuse $?
# Canceled while its files were being sent, when the queue did not have the job yet.
[ -n "$resumed" ] || [ -e log ] || [ ! -e cancelled ] || { scancel "$id"; refuse "$ended"; }
{ [ ! -s log ] || cat log >>log.earlier; } && eval "$move" &&
    rm -rf begin.json first.json end.json cancelled log gathered && touch log ||
    { scancel "$id"; refuse 1; }
rest="$(declare -f on_others release; declare -p job root new enter take sent); release '$id'"
: "$(setsid -f bash -c "$rest" 2>&1 </dev/null 9<&-)"
